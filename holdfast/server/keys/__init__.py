"""API keys: the table of them in the store, the keys that are valid now, their limits, and their usage."""

"""The engine process: what builds an engine, and the loop that serves it."""

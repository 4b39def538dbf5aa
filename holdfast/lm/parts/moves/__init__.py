"""Moves of KV blocks from the host tier of one engine to that of another."""

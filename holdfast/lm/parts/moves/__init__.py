"""Moves: KV blocks go from the host tier of one engine to that of another."""

"""Persistent conversations: the store of raw tokens and items, and the API over it."""

"""Conversations that outlive the process: the store of raw tokens and items, and the API on it."""

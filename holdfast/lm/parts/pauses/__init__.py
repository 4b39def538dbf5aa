"""Pauses: what clients say of the gap before a conversation's next turn, and state that comes back ahead of it."""

"""Anthropic's Messages API: requests read as chats, and answers written as content blocks."""

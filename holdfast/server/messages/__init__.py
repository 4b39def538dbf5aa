"""Anthropic's Messages API: requests are read as chats, and answers are written as content blocks."""

"""Prompts: the log probabilities of prompt tokens."""

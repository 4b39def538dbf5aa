"""Embeddings of prompts."""

"""Ollama's API: its requests, and its answers as lines of JSON."""

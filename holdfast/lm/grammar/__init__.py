"""Structured output: which tokens a request's grammar allows next. On the host, by llguidance; knows no tensors."""

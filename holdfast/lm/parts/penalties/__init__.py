"""Penalties on tokens that a sequence has already."""

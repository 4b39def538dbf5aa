"""Penalties on the tokens that a sequence already has."""

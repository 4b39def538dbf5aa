"""Combinations of the engine's features: which work together, which are refused, and a real engine for each."""

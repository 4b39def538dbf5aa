"""Adapters: low-rank changes of the model that requests name."""

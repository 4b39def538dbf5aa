"""Paged attention: one interface, its backends, and their kernels."""

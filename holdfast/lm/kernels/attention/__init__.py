"""Attention over a paged cache: one interface, its backends, and their kernels."""

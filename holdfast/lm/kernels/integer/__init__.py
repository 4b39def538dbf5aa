"""Packed weights on a CPU, multiplied as integers by a library in C."""

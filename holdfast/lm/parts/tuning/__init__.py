"""Tuning: slices of training steps, computed after a step's segments."""

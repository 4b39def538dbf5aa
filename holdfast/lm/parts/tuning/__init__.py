"""Tuning: adapters are trained on the served weights, in the gaps that inference leaves."""

"""Tenants: how many sequences of one may run at once."""

"""Speculation: drafted tokens that decodes verify."""

"""Grammars: which tokens a row may draw, and which must follow."""

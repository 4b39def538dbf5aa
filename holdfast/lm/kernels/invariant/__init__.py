"""Computations whose bits for a token depend on the tokens before it alone, and not on what else a step computes."""

"""Plain types and the cost model, shared by every room. Pure: standard library only."""

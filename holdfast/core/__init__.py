"""What every room shares: plain types, the cost model, the protocols between rooms. Pure: standard library only."""

"""What every room shares: plain types and the cost model. Pure: standard library only."""

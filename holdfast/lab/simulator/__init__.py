"""The real loop, schedulers and memory over a virtual clock and a cost model. Imports no torch."""

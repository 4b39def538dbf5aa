"""Runs the real loop, schedulers and memory over a virtual clock and a cost model, without torch."""

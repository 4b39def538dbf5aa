"""The engine: the loop over scheduler and executor, its process, and the ways to reach it."""

"""Memory of the KV cache: which blocks hold which state, in which tier. Pure: a block is a number, time an argument."""

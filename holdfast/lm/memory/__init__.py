"""Memory of the KV cache: which blocks hold which state, in which tier. Pure: blocks are numbers, time is given."""

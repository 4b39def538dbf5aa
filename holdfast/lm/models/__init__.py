"""Models that run on packed batches: one native decoder for several families, and Transformers for all others."""

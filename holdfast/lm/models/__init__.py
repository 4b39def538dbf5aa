"""Models that run on packed batches: one native decoder described by differences, and Transformers for the others."""

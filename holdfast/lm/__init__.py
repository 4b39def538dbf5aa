"""Language models on a paged cache: what runs next, what stays in memory, and what computes it."""

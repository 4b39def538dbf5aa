"""Any model that Transformers runs, unmodified: padded rows, which join a batch by shaping or embedding (Baton)."""

"""Several engines with one address: routing (pure), replicas and what starts them."""

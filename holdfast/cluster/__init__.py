"""Many engines behind one address: routing (pure), replicas and what starts them."""

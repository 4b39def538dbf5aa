"""What a step computes: paged attention, the linear layers around it, the cache, and sampling."""

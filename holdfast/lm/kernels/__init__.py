"""The computations of a step: paged attention, the linear layers around it, the cache, and sampling."""

"""The computations a step is made of: paged multi-token attention, the rest of a layer, the cache, sampling."""

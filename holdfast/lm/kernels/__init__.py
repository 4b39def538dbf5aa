"""The computations of a step: paged attention, recurrent layers, the linear layers around them, the cache, sampling."""

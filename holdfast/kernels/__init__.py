"""The computations a step is made of: paged multi-token attention, the cache it reads, sampling."""

"""Exchanges between the devices of one group inside a step: sums, maxima, and rows of logits."""

"""What the devices of one group tell each other inside a step: sums, maxima, and rows of logits."""

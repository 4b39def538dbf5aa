"""Mixtures of experts: which experts each token chooses, their grouped products, and the weighted sum."""

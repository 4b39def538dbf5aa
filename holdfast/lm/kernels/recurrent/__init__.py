"""Recurrent layers: causal convolutions and recurrences over each sequence's state, one interface and its backends."""

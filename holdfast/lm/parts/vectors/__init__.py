"""Vectors: the hidden states of last tokens, which embeddings are made of."""

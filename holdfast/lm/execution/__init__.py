"""Execution: turns step plans into tensors, runs them through the model, and returns tokens."""

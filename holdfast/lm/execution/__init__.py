"""Plans become tensors, run through the model, and give tokens back."""

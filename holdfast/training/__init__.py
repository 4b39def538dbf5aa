"""Fine-tunes LoRA adapters on the weights that the engine serves, in slices between its steps and during them."""

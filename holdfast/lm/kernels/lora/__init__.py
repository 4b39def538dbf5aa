"""LoRA adapters in a step: each token's own adapter added to the linear layers, any number of adapters in one batch."""

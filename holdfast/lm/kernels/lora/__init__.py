"""LoRA adapters in a step. One batch may hold any number of adapters, and each token may have its own."""

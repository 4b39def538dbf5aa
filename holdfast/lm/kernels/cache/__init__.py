"""The KV cache as tensors, and the kernels that fill and copy it."""

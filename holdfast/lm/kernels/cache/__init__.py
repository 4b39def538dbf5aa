"""The KV cache as tensors, and the kernels that copy its blocks and complete a step's inputs."""

"""The Open Inference Protocol for applications of cells."""

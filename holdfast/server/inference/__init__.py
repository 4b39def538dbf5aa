"""The Open Inference Protocol over applications of cells."""

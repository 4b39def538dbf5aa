"""Opening files safely. Standard library only."""

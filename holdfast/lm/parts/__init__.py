"""Parts: features that a step may carry besides segments. Each has one folder; the core knows none of them by name."""

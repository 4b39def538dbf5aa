"""Parts: what a step may carry besides segments. Each is one folder; the core knows none of them by name."""

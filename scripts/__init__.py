"""Programs that make or measure what the repository ships."""

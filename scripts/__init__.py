"""Programs that make or measure the files that the repository ships."""

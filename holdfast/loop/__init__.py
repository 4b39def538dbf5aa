"""The generic loop and its contracts. They know neither segments nor blocks nor cells."""

"""The generic loop and its contracts. Knows neither segments nor blocks nor cells."""

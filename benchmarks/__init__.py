"""Benchmarks and studies: each script runs as `python -m benchmarks.FOLDER.NAME` (README.md lists them)."""

"""Cells: requests are graphs of cells, and cells of one type from different requests run as one batch (BatchMaker)."""

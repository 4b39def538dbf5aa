"""Cells: each request is a graph of cells. Cells of one type from different requests run as one batch (BatchMaker)."""

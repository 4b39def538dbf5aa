"""Cells measured: workloads, a virtual executor, and the planners that cellular batching is compared with."""

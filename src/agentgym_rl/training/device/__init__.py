"""Packed passes, fused layers, captured graphs, the head, the optimizer and their kernels."""

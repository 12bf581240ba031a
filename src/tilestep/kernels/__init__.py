"""Kernels: what they are built from, their cache, and launches of Triton."""

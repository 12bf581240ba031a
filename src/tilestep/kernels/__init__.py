"""Kernels: their specs (`spec`), the cache of built kernels (`cache`), and Triton launches (`launch`)."""

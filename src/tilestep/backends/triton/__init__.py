"""Triton for GPUs: source, launches."""

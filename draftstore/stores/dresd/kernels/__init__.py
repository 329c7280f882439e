"""Kernels of dense stores, over plain arrays, without files."""

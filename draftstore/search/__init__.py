"""Kernels over token arrays: suffix arrays, matches in them, and draft trees from the continuations."""

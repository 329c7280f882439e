"""Kernels over token arrays: suffix arrays, matches in them, and trees drawn from what follows."""

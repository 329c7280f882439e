"""Accepted length of every system on every set of recorded outputs: `python -m benchmarks.quality`."""

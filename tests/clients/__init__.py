"""Benchmark clients, run as in docs/measure.md: `make test-clients`."""

"""Clients that people measure servers with, as docs/measure.md runs them: `make test-clients`."""

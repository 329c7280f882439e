"""Accepted length with drafts from earlier replies of the traffic: `python -m benchmarks.agents`."""

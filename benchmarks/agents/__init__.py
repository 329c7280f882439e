"""Accepted length where drafts also come from earlier replies of the traffic: `python -m benchmarks.agents`."""

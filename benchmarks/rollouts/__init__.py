"""Drafts from earlier rollouts of the same prompts: `python -m benchmarks.rollouts`."""

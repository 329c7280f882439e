"""The decode loop, acceptance of drafts, and choice of how much to verify."""

"""The decode loop, the acceptance of drafts, and the choice of how much to verify."""

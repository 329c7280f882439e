"""The decode loop, what it accepts, and how much of a draft is worth a pass."""

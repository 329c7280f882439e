"""What a decoder asks of a drafter, and the drafters that need no store."""

"""Decoding with drafts, in a loop and in the decoding worker."""

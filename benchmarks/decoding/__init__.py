"""Decoding with drafts: in a loop, in the decoding worker, and what drafts cost a mixture of experts."""

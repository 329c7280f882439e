"""Drafts at the seams of vLLM and SGLang."""

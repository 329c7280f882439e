"""Drafts at the interfaces of vLLM and SGLang."""

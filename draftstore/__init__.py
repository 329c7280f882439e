"""Retrieval-based speculative decoding: draft stores built from text, drafts from them in microseconds."""

__version__ = "0.1.0.dev0"

"""Drafts inside inference engines: vLLM and SGLang, and files for llama.cpp."""

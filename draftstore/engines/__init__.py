"""Drafts inside the engines that people decode with: vLLM, SGLang; and files for llama.cpp."""

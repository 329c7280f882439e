"""Decoding with drafts in transformers: `model.generate(..., custom_generate=speculative_generate, drafter=...)`."""

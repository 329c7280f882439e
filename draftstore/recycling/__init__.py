"""Token Recycling: drafts from the candidates that the model computes during decoding and usually discards."""

"""A model's own answers as a corpus."""

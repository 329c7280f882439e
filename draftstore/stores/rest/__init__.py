"""REST: the corpus as suffix arrays."""

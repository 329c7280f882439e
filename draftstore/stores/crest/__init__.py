"""CREST: n-grams with precomputed draft trees."""

"""CREST: n-grams with their draft trees, ready made."""

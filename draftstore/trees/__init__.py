"""Draft trees: nodes, their binary codec, and best-first growth."""

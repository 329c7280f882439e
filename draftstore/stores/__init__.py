"""Stores that drafts are drawn from: one folder a kind, and the registry that opens any of them."""

"""Stores that serve drafts: one package per kind, and a registry that opens any of them."""

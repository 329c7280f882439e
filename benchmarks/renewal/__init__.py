"""Stores whose text grows and changes."""

"""The lookup service under load."""

"""Renewal: stores that keep up with their sources, built, registered and published. Flows call these steps."""

"""Commands of the services."""

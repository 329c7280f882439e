"""The commands of the services."""

"""Shared parts of the services: permissions, listening addresses and sockets, HTTP, and the log."""

"""Shared parts of the services: permissions, listening sockets, HTTP guards and server, and the log."""

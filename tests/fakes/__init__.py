"""Shared stand-ins for models, networks, services and stores."""

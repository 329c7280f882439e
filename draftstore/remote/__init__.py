"""The client of the lookup service: frames, connections, drafters."""

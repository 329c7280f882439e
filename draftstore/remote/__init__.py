"""The client of the lookup service: wire format, connections, drafters."""

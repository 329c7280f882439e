"""The whole system under every possible fault."""

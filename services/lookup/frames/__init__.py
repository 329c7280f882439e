"""The binary protocol: connections, their turns, and the answers."""

"""The server of the binary protocol: connections, their scheduling, and the answers."""

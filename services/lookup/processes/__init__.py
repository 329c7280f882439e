"""The processes of the service: supervisor, workers and HTTP process; their start, life and end."""

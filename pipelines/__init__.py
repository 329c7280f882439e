"""Flows that build stores on schedule: thin shells over library functions. Never imports `services`."""

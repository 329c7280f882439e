"""Long-running processes: the lookup service and the decoding worker. Never imports `pipelines`."""

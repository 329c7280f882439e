"""A draft tree, and nothing else: nodes, their binary codec, and the frontier in which trees grow."""

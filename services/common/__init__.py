"""What the services share: who may ask, where they listen, how HTTP is guarded and served, and the log."""

"""Token Recycling: a model's own candidates, persisted between processes."""

"""A drafter of named sources."""

"""n-gram statistics for SQL, and trees as text."""

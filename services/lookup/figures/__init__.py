"""The counters of the service: words in shared memory that every process adds to, and their readers."""

"""How the embedded PostgreSQL server is placed, made, run and ended; `schema.embedded` is how to use it."""

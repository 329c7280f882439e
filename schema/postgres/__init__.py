"""Location, creation, start and end of the embedded PostgreSQL server; its interface is `schema.embedded`."""

"""The database itself: connections, migrations, the reader, and the embedded server."""

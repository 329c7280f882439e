"""Live stores: documents that draft from the next request on, kept in a log that processes share."""

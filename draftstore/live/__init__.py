"""Live stores: documents available for drafts from the next request on, kept in a log shared by processes."""

"""The lookup service: drafts for many decoders from shared open stores."""

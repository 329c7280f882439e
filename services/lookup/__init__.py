"""The lookup service: drafts for many decoders from stores that are open once."""

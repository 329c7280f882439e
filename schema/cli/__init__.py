"""Commands on the catalogue."""

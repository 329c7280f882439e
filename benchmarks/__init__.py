"""Timed programs; each prints a table and, as its last line, one JSON document."""

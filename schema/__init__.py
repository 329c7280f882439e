"""The catalogue in SQL. Imports `draftstore` and nothing above it."""

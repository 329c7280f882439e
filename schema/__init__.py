"""The catalogue in SQL: models, views, engine and session. Imports `draftstore` and nothing above it."""

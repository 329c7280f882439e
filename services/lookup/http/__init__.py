"""HTTP: drafts in JSON, releases, health, metrics, and the web page."""

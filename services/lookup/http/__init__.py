"""HTTP: drafts in JSON, releases, health, metrics, and the page for people."""

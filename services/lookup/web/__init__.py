"""HTTP: JSON, health, metrics, and the page for people."""

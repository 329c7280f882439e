"""Storage on disk: atomic files, manifests, and resumable builds."""

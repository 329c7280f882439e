"""How anything lies on disk: whole or absent, described by a manifest, resumed after a kill."""

"""DReSD: hidden states with what came next."""

"""DReSD: hidden states with the tokens that followed."""

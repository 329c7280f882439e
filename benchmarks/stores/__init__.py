"""Cost and yield of stores: REST by size, CREST by bytes, DReSD on a real model."""

"""What stores cost and hold: REST by size and beside other libraries, CREST by bytes, DReSD on a real model."""

"""The interface between decoders and drafters, and drafters without a store."""

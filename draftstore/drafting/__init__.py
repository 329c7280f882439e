"""The interface between decoders and drafters, and the drafters without a store."""

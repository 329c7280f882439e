"""The decoding worker: OpenAI's API for a model with lossless speculative decoding from stores."""

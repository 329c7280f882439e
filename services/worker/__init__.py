"""The decoding worker: a model that answers OpenAI's API, faster by the drafts of stores, and with the same words."""

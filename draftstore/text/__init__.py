"""From text to token ids and back: corpora, conversations, tokenizers, token shards."""

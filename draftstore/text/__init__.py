"""Text processing: corpora, conversations, tokenizers, token shards."""

"""The tokenizer of a GGUF file, converted by transformers to the usual tokenizer files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftstore.errors import TokenizerError, needs_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GGUF_SUFFIX = ".gguf"


def read_gguf(path: Path) -> dict[str, bytes]:
    """Return the tokenizer of a GGUF file as `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        TokenizerError: the file cannot be read, or its tokenizer is unknown to transformers.
        MissingExtraError: a package of the extra `hf` is missing.
    """
    with needs_extra("gguf", "hf"):
        import gguf  # noqa: F401 (transformers needs it, but its own error message differs)
    with needs_extra("transformers", "hf"):
        from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return converted(tokenizer, tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise TokenizerError(
            f"{path} has no usable tokenizer: {' '.join(str(error).split())[:300]}"
        ) from error


def converted(tokenizer: "PreTrainedTokenizerBase", state: str) -> dict[str, bytes]:
    """Return a transformers tokenizer as files; `state` is its `tokenizer.json`."""
    named = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "add_bos_token")
    config: dict[str, Any] = {key: getattr(tokenizer, key, None) for key in named}
    config = {key: value for key, value in config.items() if isinstance(value, str | bool)}
    return {"tokenizer.json": state.encode(), "tokenizer_config.json": json.dumps(config).encode()}

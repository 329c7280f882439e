"""The files of a model's tokenizer: found on disk or on the Hugging Face hub, or converted from a GGUF file."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftstore.errors import TokenizerError, needs_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_FILE = "chat_template.json"  # of models that can also read images
FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE, PROCESSOR_FILE)
GGUF_SUFFIX = ".gguf"


def main_file(spec: str) -> Path:
    """Return the file with a tokenizer's vocabulary: `tokenizer.json`, or else a GGUF file."""
    path = Path(spec)
    if path.is_file():
        return path
    folder = path if path.is_dir() else _download(spec)
    if (folder / TOKENIZER_FILE).is_file():
        return folder / TOKENIZER_FILE
    files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if len(files) != 1:
        several = f"{len(files)} {GGUF_SUFFIX} files: name one of them"
        advice = several if files else "pass a folder or a hub name with a fast tokenizer"
        raise TokenizerError(f"{folder} has no {TOKENIZER_FILE}: {advice}")
    return files[0]


def _download(name: str) -> Path:
    """Return the local folder of a hub model's tokenizer files, downloading missing ones."""
    accepted = f"a folder with {TOKENIZER_FILE}, such a file, a GGUF file, or a hub name organisation/model"
    if name.startswith((".", "/", "~")) or name.endswith((".json", GGUF_SUFFIX, "/")):
        raise TokenizerError(f"no such file or folder: {name}: pass {accepted}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise TokenizerError(f"no tokenizer at {name!r}: pass {accepted}")
    with needs_extra("huggingface_hub"):
        from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(
            f"{name!r} is neither a local folder nor a tokenizer on the hub ({reason}): pass {accepted}; "
            "a gated model needs `hf auth login` first"
        ) from None


def read_gguf(path: Path) -> dict[str, bytes]:
    """Return the tokenizer of a GGUF file as transformers converts it: `tokenizer.json` and its configuration."""
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
    return {TOKENIZER_FILE: state.encode(), CONFIG_FILE: json.dumps(config).encode()}

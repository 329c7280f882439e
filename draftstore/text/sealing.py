"""The end of every build of token ids: the tokenizer joins the store, and the manifest makes it one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftstore.storage.files import remove
from draftstore.storage.manifest import MANIFEST_NAME, TOKENIZER_FOLDER, Manifest, save_manifest
from draftstore.storage.staging import build_time, hash_files
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import token_dtype


def seal_store(
    store: Path,
    name: str,
    tokenizer: TextTokenizer,
    parameters: dict[str, Any],
    corpus: dict[str, Any],
    counts: dict[str, int],
    *,
    target_model: str | None = None,
    on_bytes: Callable[[int, int], None] = lambda _done, _all: None,
) -> Manifest:
    """Complete a store of token ids: add the tokenizer, and last the manifest; see `Manifest` for the arguments."""
    for path in [store / TOKENIZER_FOLDER, store / MANIFEST_NAME, *store.glob(".*")]:
        remove(path)
    (store / TOKENIZER_FOLDER).mkdir()
    tokenizer.save(store / TOKENIZER_FOLDER)
    manifest = Manifest(
        kind=parameters["plan"]["kind"],
        name=name,
        created=build_time(),
        vocab_size=tokenizer.vocab_size,
        token_dtype=token_dtype(tokenizer.vocab_size).name,
        tokenizer=tokenizer.identity,
        parameters=parameters,
        corpus=corpus,
        counts=counts,
        files=hash_files(store, on_bytes),
        target_model=target_model,
    )
    save_manifest(store, manifest)
    return manifest

"""`draftstore build recycling`: an initial store of a model's candidates."""

import time
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from draftstore.cli.build import TOKENIZER_HELP, name_option, out_option, overwrite_option, report_build
from draftstore.cli.common import STORE, json_option, status
from draftstore.drafting.rank_tree import MAX_PATHS, RankTree
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.errors import StoreError
from draftstore.hf.loading import model_name
from draftstore.storage.manifest import MANIFEST_NAME, Manifest, TokenizerIdentity
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.recycling.build import save_recycling
from draftstore.stores.recycling.build import seed_from as successors
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import load_tokenizer


@click.command()
@click.option("--model-id", required=True, metavar="M", help="The model, as `generate --model` names it.")
@click.option("--tokenizer", metavar="T", help=TOKENIZER_HELP + " [default: that of --seed-from]")
@click.option(
    "--seed-from",
    type=STORE,
    metavar="STORE",
    help="Start from the most common successors of each token in this REST or CREST store.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(1, 2**31 - 1),
    help="Number of ids that the model may emit. [default: that of the tokenizer]",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MAX_PATHS),
    help="Number of nodes in the static tree. [default: the paper's 80]",
)
@out_option
@name_option
@overwrite_option
@json_option
def recycling(
    model_id: str,
    tokenizer: str | None,
    seed_from: Path | None,
    vocab_size: int | None,
    nodes: int | None,
    out: Path,
    name: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Build a recycling store: a model's candidates, empty at first or seeded with the bigrams of a corpus.

    It belongs to one model. `generate --store` and `worker --store` begin with it, and fill a copy of their own.

    \b
    Example:
      draftstore build recycling --model-id ./model --seed-from stores/chat --out stores/chat-recycling
    """
    begin = time.perf_counter()
    if tokenizer is None and seed_from is None:
        raise click.UsageError(
            "Give --tokenizer with the model's tokenizer, or --seed-from with a store built with it."
        )
    identity, ids = _identify(tokenizer)
    matrix, seed = None, None
    if seed_from is not None:
        with status("counting successors"):
            matrix, seed = _read_seed(seed_from, identity)
        identity, ids = identity or seed.tokenizer, max(ids, seed.vocab_size)
    assert identity is not None
    drafter = RecyclingDrafter(
        vocab_size or ids, matrix=matrix, tree=RankTree() if nodes is None else RankTree().resized(nodes)
    )
    result = save_recycling(
        drafter,
        out,
        target_model=model_name(model_id),
        tokenizer=identity,
        name=name,
        seed=seed,
        sources=() if seed_from is None else [seed_from / MANIFEST_NAME],
        overwrite=overwrite,
    )
    report_build(result, time.perf_counter() - begin, as_json)


def _identify(tokenizer: str | None) -> tuple[TokenizerIdentity | None, int]:
    """Return the identity of the named tokenizer, and its vocabulary size."""
    if tokenizer is None:
        return None, 0
    loaded = load_tokenizer(tokenizer)
    return loaded.identity, loaded.vocab_size


def _read_seed(path: Path, identity: TokenizerIdentity | None) -> tuple[NDArray[np.int32], Manifest]:
    """Return the successors in a store, and its manifest."""
    store = open_store(path)
    try:
        if identity is not None:
            store.manifest.require_tokenizer(identity, path)
        if not isinstance(store, RestStore | CrestStore):
            raise StoreError(f"{path} is a store of kind {store.manifest.kind!r}, expected 'rest' or 'crest'")
        return successors(store), store.manifest
    finally:
        store.close()

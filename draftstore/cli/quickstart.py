"""`draftstore quickstart`: build, measure and inspect a store of the Python source on this machine."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import click
import numpy as np
from pydantic import Field

from draftstore.cli.common import progress_bars, status, warm
from draftstore.cli.options import SpreadCommand, takes
from draftstore.cli.output import json_option, print_json, print_table, say
from draftstore.cli.query import describe, draw_tree, timed_draft
from draftstore.decoding.replay import Recording, read_recordings
from draftstore.decoding.replay import replay as replay_recordings
from draftstore.errors import counted
from draftstore.options import Options, Shown
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.registry import Store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.python_source import (
    HELD_OUT,
    default_folders,
    find_sources,
    hold_out,
    quickstart_tokenizer,
    write_corpus,
    write_recordings,
)
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.frontier import BUDGET, MAX_BUDGET

CONTEXT_TOKENS = 24
DRAWN_NODES = 24
CREST_NGRAMS = 30_000
TITLES = {"longest": "REST, longest", "backoff": "REST, backoff", "crest": "CREST, backoff"}


class QuickstartOptions(Options):
    """Options of what to build and replay, and where."""

    out: Path = Field(Path("data/quickstart"), description="Folder for all files.")
    tokenizer: Annotated[str | None, Shown(unset="one from an installed package", metavar="T")] = Field(
        None, description="A folder, a tokenizer.json or a hub name."
    )
    source: Annotated[
        tuple[Path, ...], Shown(unset="the standard library and installed packages", metavar="FOLDER...")
    ] = Field((), description="Folders of Python source.")
    held_out: int = Field(HELD_OUT, ge=1, description="Maximum number of files to replay.")
    budget: int = Field(BUDGET, ge=1, le=MAX_BUDGET, description="Maximum number of nodes in a draft.")


@click.command(cls=SpreadCommand)
@takes(options=QuickstartOptions)
@json_option
def quickstart(options: QuickstartOptions, as_json: bool) -> None:
    """Build stores of the Python source on this machine and replay files that are not in them.

    \b
    Example:
      draftstore quickstart --out /tmp/try
    """
    out, budget = options.out, options.budget
    out.mkdir(parents=True, exist_ok=True)
    with status("reading Python source"):
        stored, held = hold_out(find_sources(options.source or default_folders()), options.held_out)
        write_corpus(out / "corpus.jsonl", stored)
        write_recordings(out / "held-out.jsonl", held)
    with status("preparing a tokenizer"):
        name = options.tokenizer
        given = (load_tokenizer(name), f"as given: {name}") if name else None
        loaded, origin = given or quickstart_tokenizer(out, stored)
    say(f"tokenizer: {origin}, {loaded.vocab_size:,} ids", err=True)
    with progress_bars() as progress:
        texts = RestOptions(corpus=(out / "corpus.jsonl",), name="python-source")
        rest = build_rest(texts, loaded, out / "store", overwrite=True, progress=progress).path
        trees = CrestOptions(name="python-source-crest", ngrams=CREST_NGRAMS)
        crest = build_crest(trees, rest, out / "crest", overwrite=True, progress=progress).path
    store, small = RestStore.open(rest), CrestStore.open(crest)
    recordings = list(read_recordings(out / "held-out.jsonl", loaded))
    figures = {strategy: _replay(store, strategy, recordings, budget) for strategy in ("longest", "backoff")}
    figures["crest"] = _replay(small, "backoff", recordings, budget)
    sizes = dict.fromkeys(figures, store.manifest.size) | {"crest": small.manifest.size}
    counts = store.manifest.counts
    if as_json:
        return print_json(
            {
                "store": rest,
                "crest": crest,
                "bytes": sizes,
                "tokenizer": origin,
                "counts": counts,
                "held_out": len(held),
                "budget": budget,
                "replay": figures,
            }
        )
    say(
        f"store: {counted(counts['documents'], 'file')}, {counted(counts['tokens'], 'token')}; replayed: "
        f"{counted(len(held), 'file')} without a copy in it\n"
    )
    columns = ("store", "accepted length", "nodes a draft", "lookup p50 µs", "p99 µs", "bytes")
    print_table(columns, [(TITLES[name], *_figures(row), sizes[name]) for name, row in figures.items()])
    say("plain decoding: 1.00 tokens a pass")
    _show_tree(store, loaded, recordings)
    path = shlex.quote(str(rest))
    say(f"\nThe stores are in {rest} and {crest}. Next:")
    say(f"  draftstore info {path}")
    say(f'  draftstore query {path} --text "for i in range("')
    return say(f"  draftstore serve --store {path}")


def _replay(store: Store, strategy: str, recordings: list[Recording], budget: int) -> dict[str, Any]:
    drafter = warm(store.drafter(strategy))
    with progress_bars() as progress:
        step = progress(f"replaying with {store.manifest.kind}, {strategy}", "files")
        return replay_recordings(drafter, recordings, budget=budget, on_progress=step).summary()


def _figures(row: dict[str, Any]) -> tuple[Any, ...]:
    length, times = f"{row['accepted_length']:.2f} tokens a pass", row["lookup_us"]
    return length, row["nodes_mean"], times["p50"], times["p99"]


def _show_tree(store: RestStore, tokenizer: TextTokenizer, recordings: list[Recording]) -> None:
    """Draw the draft after the prompt of a held-out file: the one at the upper quartile of confidence."""
    drafter = store.drafter("backoff")
    contexts = [drafter.session(recording.prompt).slots.contexts for recording in recordings]
    drafts = drafter.draft(np.concatenate(contexts), DRAWN_NODES)
    by_confidence = sorted(range(len(drafts)), key=lambda i: float(drafts[i].tree.probs.sum()))
    chosen = by_confidence[3 * len(drafts) // 4]
    draft, micros = timed_draft(drafter, contexts[chosen], DRAWN_NODES)
    context = recordings[chosen].prompt[-CONTEXT_TOKENS:]
    matched = tokenizer.decode(context[len(context) - draft.match_length :])
    say(f"\nA draft of {DRAWN_NODES} nodes inside {recordings[chosen].id}:")
    say(describe(draft, matched, micros))
    say(f"{tokenizer.decode(context)[-60:]!r}\n{draw_tree(draft.tree, tokenizer)}")

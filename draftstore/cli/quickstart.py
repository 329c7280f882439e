"""`draftstore quickstart`: build, measure and look at a store of the Python source on this machine."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from draftstore.cli.build import build_bars
from draftstore.cli.common import (
    ManyValues,
    count_progress,
    index_bytes,
    json_option,
    print_json,
    printable,
    status,
    stderr_console,
    stdout_console,
    warm,
)
from draftstore.cli.crest import crest_bars
from draftstore.cli.query import describe, draw, timed_draft
from draftstore.decoding.replay import Recording, read_recordings
from draftstore.decoding.replay import replay as replay_recordings
from draftstore.drafting.drafter import propose_batch
from draftstore.errors import counted
from draftstore.quickstart import (
    HELD_OUT,
    default_folders,
    find_sources,
    hold_out,
    quickstart_tokenizer,
    write_corpus,
    write_recordings,
)
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.registry import Store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import BUDGET, RestStore
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.frontier import MAX_BUDGET

CONTEXT_TOKENS = 24
DRAWN_NODES = 24
CREST_NGRAMS = 30_000
TITLES = {"longest": "REST, longest", "backoff": "REST, backoff", "crest": "CREST, backoff"}


@click.command(cls=ManyValues)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("data/quickstart"),
    show_default=True,
    help="Folder for all files.",
)
@click.option(
    "--tokenizer",
    metavar="T",
    help="A folder, a tokenizer.json or a hub name. [default: one from an installed package]",
)
@click.option(
    "--source",
    multiple=True,
    metavar="FOLDER...",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folders of Python source. [default: the standard library and installed packages]",
)
@click.option(
    "--held-out",
    type=click.IntRange(min=1),
    default=HELD_OUT,
    show_default=True,
    help="Maximum number of files to replay.",
)
@click.option(
    "--budget",
    type=click.IntRange(1, MAX_BUDGET),
    default=BUDGET,
    show_default=True,
    help="Maximum number of nodes in a draft.",
)
@json_option
def quickstart(
    out: Path, tokenizer: str | None, source: tuple[Path, ...], held_out: int, budget: int, as_json: bool
) -> None:
    """Build stores of the Python source on this machine and replay files that are not in them.

    \b
    Example:
      draftstore quickstart --out /tmp/try
    """
    console = stderr_console()
    out.mkdir(parents=True, exist_ok=True)
    with status("reading Python source"):
        stored, held = hold_out(find_sources(source or default_folders()), held_out)
        write_corpus(out / "corpus.jsonl", stored)
        write_recordings(out / "held-out.jsonl", held)
    if tokenizer:
        loaded, origin = load_tokenizer(tokenizer), f"as given: {tokenizer}"
    else:
        with status("preparing a tokenizer"):
            loaded, origin = quickstart_tokenizer(out, stored)
    console.print(f"tokenizer: {origin}, {loaded.vocab_size:,} ids")
    options = RestOptions(corpus=(out / "corpus.jsonl",), name="python-source")
    with build_bars() as progress:
        built = build_rest(options, loaded, out / "store", overwrite=True, progress=progress)
    crest_options = CrestOptions(name="python-source-crest", ngrams=CREST_NGRAMS)
    with crest_bars() as crest_progress:
        crest = build_crest(crest_options, built.path, out / "crest", overwrite=True, progress=crest_progress)
    store = RestStore.open(built.path)
    recordings = list(read_recordings(out / "held-out.jsonl", loaded))
    figures = {strategy: _replay(store, strategy, recordings, budget) for strategy in ("longest", "backoff")}
    small = CrestStore.open(crest.path)
    figures["crest"] = _replay(small, "backoff", recordings, budget)
    sizes = dict.fromkeys(figures, index_bytes(store.manifest)) | {"crest": index_bytes(small.manifest)}
    counts = store.manifest.counts
    if as_json:
        print_json(
            {
                "store": str(built.path),
                "crest": str(crest.path),
                "bytes": sizes,
                "tokenizer": origin,
                "counts": counts,
                "held_out": len(held),
                "budget": budget,
                "replay": figures,
            }
        )
        return
    output = stdout_console()
    output.print(
        f"store: {counted(counts['documents'], 'file')}, {counted(counts['tokens'], 'token')}; replayed: "
        f"{counted(len(held), 'file')} without a copy in it\n"
    )
    output.print(_table(figures, sizes))
    _show_tree(output, store, loaded, recordings)
    path, command = shlex.quote(printable(built.path)), command_line()
    output.print(
        f"\nThe stores are in {printable(built.path)} and {printable(crest.path)}. Next:", soft_wrap=True
    )
    output.print(f"  {command} info {path}", soft_wrap=True)
    output.print(f'  {command} query {path} --text "for i in range("', soft_wrap=True)
    output.print(f"  {command} serve --store {path}", soft_wrap=True)


def command_line() -> str:
    """Return how to run this program again: its name if the shell finds it, else its path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m draftstore"
    found = shutil.which(program.name)
    named = not program.is_file() or (found is not None and program.samefile(found))
    return program.name if named else shlex.quote(sys.argv[0])


def _replay(store: Store, strategy: str, recordings: list[Recording], budget: int) -> dict[str, Any]:
    drafter = warm(store.drafter(strategy))
    with count_progress("files") as bars:
        title = f"replaying with {store.manifest.kind}, {strategy}"
        task = bars.add_task(title, total=len(recordings), detail="")
        result = replay_recordings(
            drafter, recordings, budget=budget, on_progress=lambda now: bars.update(task, completed=now.rows)
        )
    return result.summary()


def _table(figures: dict[str, dict[str, Any]], sizes: dict[str, int]) -> Table:
    table = Table("store", "accepted length", "nodes a draft", "lookup p50 µs", "p99 µs", "bytes")
    for name, row in figures.items():
        times = row["lookup_us"]
        length = f"{row['accepted_length']:.2f} tokens a pass"
        figures_text = map(str, (row["nodes_mean"], times["p50"], times["p99"]))
        table.add_row(TITLES[name], length, *figures_text, f"{sizes[name]:,}")
    table.caption = "plain decoding: 1.00 tokens a pass"
    return table


def _show_tree(
    output: Console, store: RestStore, tokenizer: TextTokenizer, recordings: list[Recording]
) -> None:
    """Draw the draft behind the head of a held-out file: one at the upper quartile of confidence."""
    drafter = store.drafter("backoff")
    sessions = [drafter.session(recording.prompt) for recording in recordings]
    trees = propose_batch(drafter, sessions, DRAWN_NODES)
    by_confidence = sorted(range(len(trees)), key=lambda i: float(trees[i].probs.sum()))
    chosen = by_confidence[3 * len(trees) // 4]
    draft, micros = timed_draft(drafter, sessions[chosen].context, DRAWN_NODES)
    context = recordings[chosen].prompt[-CONTEXT_TOKENS:]
    matched = tokenizer.decode(context[len(context) - draft.match_length :])
    output.print(f"\nA draft of {DRAWN_NODES} nodes inside {printable(recordings[chosen].id)}:")
    output.print(describe(draft, matched, micros))
    output.print(draw(draft.tree, tokenizer, repr(tokenizer.decode(context)[-60:])))

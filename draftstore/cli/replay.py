"""`draftstore replay`: accepted length of recorded outputs."""

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftstore.cli.common import (
    STORE,
    count_progress,
    drafting_options,
    json_option,
    open_store,
    print_json,
    printable,
    stdout_console,
    warm,
)
from draftstore.manifest import load_manifest
from draftstore.plugins import load_plugin
from draftstore.replay import ReplayResult, read_recordings
from draftstore.replay import replay as replay_recordings


@click.command()
@click.argument("directories", nargs=-1, required=True, type=STORE, metavar="DIR...")
@click.option(
    "--replays", required=True, type=click.Path(path_type=Path), help="Recorded outputs, .jsonl (.gz, .zst)."
)
@click.option("--model", help="Only the outputs of this model.")
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of outputs.")
@click.option("--record", is_flag=True, help="Keep the result in the catalogue, with the store's build.")
@drafting_options
@json_option
def replay(
    directories: tuple[Path, ...],
    replays: Path,
    model: str | None,
    limit: int | None,
    record: bool,
    budget: int,
    min_prob: float,
    strategy: str,
    backend: str | None,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Walk recorded outputs and count how many tokens a forward pass would have yielded.

    With several stores there is one line each; with --json one JSON document a line.

    \b
    Example:
      draftstore replay stores/chat --replays alpaca.jsonl.zst --model vicuna-7b-v1.5 --budget 32
    """
    _warn_of_tokenizers(directories)
    table = Table(
        "store", "strategy", "budget", "accepted length", "nodes", "misses", "p50 µs", "p99 µs", "passes"
    )
    for directory in directories:
        store, loaded = open_store(directory, tokenizer, backend)
        drafter = warm(store.drafter(strategy))
        with count_progress("outputs") as bars:
            task = bars.add_task(printable(store.manifest.name), total=limit, detail="")

            def show(result: ReplayResult, task: Any = task, bars: Any = bars) -> None:
                bars.update(
                    task, completed=result.rows, detail=f"accepted length {result.accepted_length:.3f}"
                )

            recordings = read_recordings(replays, loaded, model=model, limit=limit)
            result = replay_recordings(
                drafter, recordings, budget=budget, min_prob=min_prob, on_progress=show
            )
        figures = result.summary()
        if record:
            report = load_plugin("draftstore.recorders", "catalogue", "the catalogue")
            report(directory, figures, recordings=replays, model=model, strategy=strategy, budget=budget)
        if as_json:
            print_json({"store": str(directory), "strategy": strategy, "budget": budget, **figures})
        else:
            table.add_row(
                store.manifest.name, strategy, str(budget), f"{figures['accepted_length']:.3f}",
                str(figures["nodes_mean"]), f"{figures['miss_rate']:.1%}", str(figures["lookup_us"]["p50"]),
                str(figures["lookup_us"]["p99"]), f"{figures['passes']:,}",
            )  # fmt: skip
    if not as_json:
        stdout_console().print(table)


def _warn_of_tokenizers(directories: tuple[Path, ...]) -> None:
    """Warn where the tokens of one store are not those of another."""
    identities = [load_manifest(directory).tokenizer for directory in directories]
    if len({identity.fingerprint for identity in identities}) > 1:
        names = ", ".join(printable(directory) for directory in dict.fromkeys(directories))
        click.echo(
            f"warning: {names} are counted in tokens of different tokenizers: "
            "accepted lengths are not comparable",
            err=True,
        )

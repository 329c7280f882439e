"""`draftstore replay`: accepted length of recorded outputs."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.table import Table

from draftstore.cli.common import (
    STORE,
    check_strategy,
    count_progress,
    drafting_options,
    json_option,
    open_store,
    print_json,
    printable,
    status,
    stdout_console,
    strategy_of,
    warm,
)
from draftstore.cli.sources import device_option, dtype_option
from draftstore.decoding.replay import Recording, ReplayResult, read_recordings
from draftstore.decoding.replay import replay as replay_recordings
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError
from draftstore.plugins import load_plugin
from draftstore.storage.manifest import load_manifest
from draftstore.stores.dresd.store import KIND as DENSE
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import KINDS
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

COLUMNS = (
    "store", "drafts", "budget", "accepted length", "accepted", "nodes", "misses", "p50 µs", "p99 µs", "passes",
)  # fmt: skip


class Subject(NamedTuple):
    """A drafter to replay, with its settings.

    Attributes:
        store: its directory; None: the request alone.
        name: name of the store; `none` without one.
        strategy: strategy of the store; None without one.
        request: whether the request drafts too.
        drafter: the drafter.
        tokenizer: tokenizer that defines the token counts.
        model: model for hidden states; None if the store needs none.
    """

    store: Path | None
    name: str
    strategy: str | None
    request: bool
    drafter: Drafter
    tokenizer: TextTokenizer
    model: "LoadedModel | None" = None

    @property
    def sources(self) -> str:
        """Names of the sources: `backoff`, `backoff + request` or `request`."""
        return " + ".join(filter(None, (self.strategy, "request" * self.request)))


@click.command()
@click.argument("directories", nargs=-1, type=STORE, metavar="DIR...")
@click.option(
    "--replays", required=True, type=click.Path(path_type=Path), help="Recorded outputs, .jsonl (.gz, .zst)."
)
@click.option("--model", help="Replay only the outputs of this model.")
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of outputs.")
@click.option(
    "--request",
    is_flag=True,
    help="Draft from the prompt and the output so far, too; without a store, from these alone (needs --tokenizer).",
)
@click.option(
    "--target-model",
    metavar="M",
    help="Model that made the outputs; DReSD stores draft from its hidden states. A directory, a hub name "
    "organisation/model, or a GGUF file.",
)
@device_option
@dtype_option
@click.option(
    "--chain",
    type=click.IntRange(min=1),
    metavar="N",
    help="Verify one path of each draft, of at most N tokens, as engines do that take no trees.",
)
@click.option("--record", is_flag=True, help="Keep the result in the catalogue, with the store's build.")
@drafting_options
@json_option
def replay(
    directories: tuple[Path, ...],
    replays: Path,
    model: str | None,
    limit: int | None,
    request: bool,
    target_model: str | None,
    device: str | None,
    dtype: str | None,
    chain: int | None,
    record: bool,
    budget: int,
    min_prob: float,
    strategy: str | None,
    backend: str | None,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Walk recorded outputs and count how many tokens a forward pass would have yielded.

    With several stores there is one line each; with --json one JSON document a line. DReSD stores are asked with hidden
    states, which the model that made the outputs computes once more: name it with --target-model.

    \b
    Example:
      draftstore replay stores/chat --replays alpaca.jsonl.zst --model vicuna-7b-v1.5 --budget 32
      draftstore replay stores/chat --request --replays alpaca.jsonl.zst
      draftstore replay stores/chat --chain 8 --replays alpaca.jsonl.zst
      draftstore replay --request --tokenizer tokenizers/llama2 --replays alpaca.jsonl.zst
      draftstore replay stores/chat-dresd --target-model ./SmolLM2-135M-Instruct --replays answers.jsonl
    """
    _check(directories, request=request, tokenizer=tokenizer, record=record)
    if record and chain is not None:
        raise click.UsageError("--record keeps what whole trees yield: leave --chain out.")
    check_strategy(strategy, [load_manifest(directory).kind for directory in directories] or KINDS)
    loaded = _load(directories, target_model, device, dtype)
    _warn_of_tokenizers(directories)
    table = Table(*COLUMNS)
    for subject in _subjects(directories, strategy, backend, tokenizer, loaded, request=request):
        figures = _replay(subject, replays, model, limit, budget, min_prob, chain).summary()
        if record:
            report = load_plugin("draftstore.recorders", "catalogue", "the catalogue")
            report(
                subject.store,
                figures,
                recordings=replays,
                model=model,
                strategy=subject.sources,
                budget=budget,
            )
        if as_json:
            store = None if subject.store is None else str(subject.store)
            print_json(
                {
                    "store": store,
                    "strategy": subject.strategy,
                    "request": request,
                    "budget": budget,
                    "chain": chain,
                    **figures,
                }
            )
        else:
            table.add_row(subject.name, subject.sources, str(budget), *_cells(figures))
    if not as_json:
        stdout_console().print(table)


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    """Return the figures of a table row."""
    return (
        f"{figures['accepted_length']:.3f}",
        f"{figures['acceptance_rate']:.1%}",
        str(figures["nodes_mean"]),
        f"{figures['miss_rate']:.1%}",
        str(figures["lookup_us"]["p50"]),
        str(figures["lookup_us"]["p99"]),
        f"{figures['passes']:,}",
    )


def _check(directories: tuple[Path, ...], *, request: bool, tokenizer: str | None, record: bool) -> None:
    """Refuse options that need a store if there is none."""
    if directories:
        return
    if not request:
        raise click.UsageError(
            "Missing argument 'DIR...': name a store, or replay the request alone with --request."
        )
    if tokenizer is None:
        raise click.UsageError(
            "--request without a store needs --tokenizer: accepted lengths count its tokens."
        )
    if record:
        raise click.UsageError("--record keeps a result with the build of a store: name a store.")


def _load(
    directories: tuple[Path, ...], target_model: str | None, device: str | None, dtype: str | None
) -> "LoadedModel | None":
    """Load the model if a store needs its hidden states."""
    dense = next((path for path in directories if load_manifest(path).kind == DENSE), None)
    if dense is None:
        return None
    if target_model is None:
        raise DraftstoreError(
            f"{dense} is a store of kind {DENSE!r}, which drafts from hidden states of the model "
            f"{load_manifest(dense).target_model!r}: give that model with --target-model"
        )
    with status("loading the model"):
        from draftstore.hf.loading import load_model

        return load_model(target_model, device=device, dtype=dtype)


def _subjects(
    directories: tuple[Path, ...],
    strategy: str | None,
    backend: str | None,
    tokenizer: str | None,
    model: "LoadedModel | None",
    *,
    request: bool,
) -> Iterator[Subject]:
    """Open the stores one after the other, or none."""
    for directory in directories:
        asked = model if load_manifest(directory).kind == DENSE else None
        if asked is not None:
            DresdStore.open(
                directory,
                target_model=asked.name,
                tokenizer=asked.text.identity,
                hidden_size=asked.hidden_size,
            ).close()
        store, loaded = open_store(directory, tokenizer, backend)
        name = strategy_of(store, strategy)
        drafter: Drafter = warm(store.drafter(name))
        if request:
            drafter = _with_request(drafter, store.manifest.vocab_size)
        yield Subject(directory, store.manifest.name, name, request, drafter, loaded, asked)
    if not directories and tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        yield Subject(None, "none", None, request, _with_request(None, loaded.vocab_size), loaded)


def _with_request(drafter: Drafter | None, vocab_size: int) -> Drafter:
    """Return the request drafter, mixed with a store's if there is one."""
    from_request = RequestDrafter(vocab_size)
    mixture = Mixture([from_request] if drafter is None else [from_request, drafter])
    with status("compiling kernels (once after an install)"):
        from_request.warm_up()
        mixture.warm_up()
    return mixture


def _replay(
    subject: Subject,
    replays: Path,
    model: str | None,
    limit: int | None,
    budget: int,
    min_prob: float,
    chain: int | None,
) -> ReplayResult:
    """Replay the recordings with a progress bar."""
    with count_progress("outputs") as bars:
        task = bars.add_task(printable(subject.name if subject.store else "request"), total=limit, detail="")

        def show(result: ReplayResult) -> None:
            bars.update(task, completed=result.rows, detail=f"accepted length {result.accepted_length:.3f}")

        recordings: Iterable[Recording]
        recordings = read_recordings(replays, subject.tokenizer, model=model, limit=limit)
        if subject.model is not None:
            from draftstore.hf.recorded import with_states

            recordings = with_states(subject.model.model, recordings)
        return replay_recordings(
            subject.drafter, recordings, budget=budget, min_prob=min_prob, chain=chain, on_progress=show
        )


def _warn_of_tokenizers(directories: tuple[Path, ...]) -> None:
    """Warn if the stores have different tokenizers."""
    identities = [load_manifest(directory).tokenizer for directory in directories]
    if len({identity.fingerprint for identity in identities}) > 1:
        names = ", ".join(printable(directory) for directory in dict.fromkeys(directories))
        click.echo(
            f"warning: {names} are counted in tokens of different tokenizers: "
            "accepted lengths are not comparable",
            err=True,
        )

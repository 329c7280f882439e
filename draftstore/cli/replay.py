"""`draftstore replay`: accepted lengths along recorded outputs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import click
from pydantic import Field

from draftstore.cli.common import STORE, Drafting, progress_bars, status, warm
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, print_table, printable, say
from draftstore.decoding.replay import Recording, ReplayResult, read_recordings
from draftstore.decoding.replay import replay as replay_recordings
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError
from draftstore.hf.loading import Loading
from draftstore.live.log import LiveDocument
from draftstore.live.memory import TOKENS, Memory, MemoryDrafter
from draftstore.options import Shown
from draftstore.storage.manifest import Manifest, load_manifest
from draftstore.storage.plugins import load_plugin
from draftstore.stores.dresd.store import KIND as DENSE
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import KINDS
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

COLUMNS = (
    "store", "drafts", "budget", "accepted length", "accepted", "nodes", "misses", "p50 µs", "p99 µs", "passes",
)  # fmt: skip


class Replaying(Loading):
    """Options of what to replay, and how."""

    replays: Path = Field(
        description="Recorded outputs or conversations, .jsonl (.gz, .bz2, .xz, .zst) or .parquet."
    )
    recorded_by: str | None = Field(None, description="Replay only the outputs of this model.")
    limit: int | None = Field(None, ge=1, description="Maximum number of outputs.")
    request: bool = Field(
        False,
        description="Also draft from the prompt and the output so far; without a store, from these alone (needs "
        "--tokenizer).",
    )
    live: Annotated[int | None, Shown(metavar="[TOKENS]", alone=TOKENS)] = Field(
        None,
        ge=1,
        description="Also draft from earlier outputs in the file, as a live store does; without a store, from these "
        f"alone (needs --tokenizer). The latest TOKENS are kept: {TOKENS:,} if no number is given.",
    )
    target_model: str | None = Field(
        None,
        description="Model that made the outputs; DReSD stores draft from its hidden states. A directory, a hub name "
        "organisation/model, or a GGUF file.",
    )
    chain: Annotated[int | None, Shown(metavar="N")] = Field(
        None,
        ge=1,
        description="Verify one path of each draft, of at most N tokens, like engines without tree verification.",
    )
    record: bool = Field(False, description="Save the result in the catalogue, with the store's build.")


class Subject(NamedTuple):
    """A drafter to replay."""

    name: str  # of the store; `none` without one
    strategy: str | None  # of the store
    drafter: Drafter
    tokenizer: TextTokenizer  # defines the token counts
    memory: Memory | None = None  # of earlier outputs
    model: "LoadedModel | None" = None  # for hidden states, if the store needs them

    def learn(self, recording: Recording) -> None:
        """Add an output to the memory, as a live store does when a request ends."""
        if self.memory is not None:
            self.memory.append(LiveDocument.of(recording.prompt, recording.output).ids)


@click.command(cls=Command)
@click.argument("directories", nargs=-1, type=STORE, metavar="DIR...")
@takes(options=Replaying, drafting=Drafting)
@json_option
def replay(directories: tuple[Path, ...], options: Replaying, drafting: Drafting, as_json: bool) -> None:
    """Simulate decoding along recorded outputs and report tokens per forward pass.

    Each store gets one line, or with --json one JSON document. DReSD stores need hidden states of the model that made
    the outputs: name it with --target-model.

    \b
    Example:
      draftstore replay stores/chat --replays alpaca.jsonl.zst --recorded-by vicuna-7b-v1.5 --budget 32
      draftstore replay stores/chat --request --replays alpaca.jsonl.zst
      draftstore replay stores/agent --request --live --replays agent.jsonl.zst
      draftstore replay stores/chat --chain 8 --replays alpaca.jsonl.zst
      draftstore replay --request --tokenizer tokenizers/llama2 --replays alpaca.jsonl.zst
      draftstore replay stores/chat-dresd --target-model ./SmolLM2-135M-Instruct --replays answers.jsonl
    """
    _check(directories, options, drafting)
    manifests = {directory: load_manifest(directory) for directory in directories}
    drafting.check_strategy([manifest.kind for manifest in manifests.values()] or KINDS)
    loaded = _load(manifests, options)
    _warn_of_tokenizers(manifests)
    rows = []
    for directory in directories or (None,):
        subject = _subject(directory, options, drafting, loaded)
        figures = _replay(subject, options, drafting).summary()
        latency = figures["lookup_us"]
        drafts = _drafts(subject, options)
        if options.record:
            report = load_plugin("draftstore.recorders", "catalogue", "the catalogue")
            about = {"recordings": options.replays, "model": options.recorded_by, "budget": drafting.budget}
            report(directory, figures, strategy=drafts, **about)
        if as_json:
            named = {"store": directory, "strategy": subject.strategy, "request": options.request}
            print_json(
                {**named, "live": options.live, "budget": drafting.budget, "chain": options.chain, **figures}
            )
        else:
            accepted = f"{figures['accepted_length']:.3f}", f"{figures['acceptance_rate']:.1%}"
            cost = figures["nodes_mean"], f"{figures['miss_rate']:.1%}", latency["p50"], latency["p99"]
            rows.append((subject.name, drafts, drafting.budget, *accepted, *cost, figures["passes"]))
    if not as_json:
        print_table(COLUMNS, rows)


def _drafts(subject: Subject, options: Replaying) -> str:
    live = options.live is not None
    return " + ".join(filter(None, (subject.strategy, "request" * options.request, "live" * live)))


def _check(directories: tuple[Path, ...], options: Replaying, drafting: Drafting) -> None:
    if options.record and options.chain is not None:
        raise click.UsageError("--record saves results of whole trees: omit --chain.")
    reason = ""
    if not options.request and options.live is None:
        reason = "Missing argument 'DIR...': name a store, or replay without one with --request or --live."
    elif drafting.tokenizer is None:
        asked = "--request" if options.request else "--live"
        reason = f"{asked} without a store needs --tokenizer: accepted lengths are counted in its tokens."
    elif options.record:
        reason = "--record saves a result with the build of a store: name a store."
    if reason and not directories:
        raise click.UsageError(reason)


def _load(manifests: Mapping[Path, Manifest], options: Replaying) -> "LoadedModel | None":
    dense = next((path for path, manifest in manifests.items() if manifest.kind == DENSE), None)
    if dense is None:
        return None
    if options.target_model is None:
        raise DraftstoreError(
            f"{dense} is a store of kind {DENSE!r}, which drafts from hidden states of the model "
            f"{manifests[dense].target_model!r}: name that model with --target-model"
        )
    with status("loading the model"):
        return options.load(options.target_model)


def _subject(
    directory: Path | None, options: Replaying, drafting: Drafting, model: "LoadedModel | None"
) -> Subject:
    if directory is None:
        tokenizer = load_tokenizer(drafting.tokenizer or "")
        drafter, memory = _mixed(None, tokenizer.vocab_size, options)
        return Subject("none", None, drafter, tokenizer, memory)
    asked = model if load_manifest(directory).kind == DENSE else None
    if asked is not None:
        identity, size = asked.text.identity, asked.hidden_size
        DresdStore.open(directory, target_model=asked.name, tokenizer=identity, hidden_size=size).close()
    store, tokenizer = drafting.open(directory)
    strategy = drafting.strategy_of(store)
    drafter, memory = _mixed(warm(store.drafter(strategy)), store.manifest.vocab_size, options)
    return Subject(store.manifest.name, strategy, drafter, tokenizer, memory, asked)


def _mixed(stored: Drafter | None, vocab_size: int, options: Replaying) -> tuple[Drafter, Memory | None]:
    drafters, memory = [] if stored is None else [stored], None
    if options.live is not None:
        memory = Memory(vocab_size, options.live)
        drafters.insert(0, warm(MemoryDrafter(memory, "sole" if stored is None else "supplement")))
    if options.request:
        drafters.insert(0, warm(RequestDrafter(vocab_size)))
    return warm(Mixture(drafters)), memory


def _replay(subject: Subject, options: Replaying, drafting: Drafting) -> ReplayResult:
    with progress_bars() as progress:
        name = printable(subject.name if subject.strategy else _drafts(subject, options))
        recordings: Iterable[Recording]
        recordings = read_recordings(
            options.replays, subject.tokenizer, model=options.recorded_by, limit=options.limit
        )
        if subject.model is not None:
            from draftstore.hf.states import with_states

            recordings = with_states(subject.model.model, recordings)
        return replay_recordings(
            subject.drafter,
            recordings,
            budget=drafting.budget,
            min_prob=drafting.min_prob,
            chain=options.chain,
            learn=subject.learn,
            on_progress=progress(name, "outputs"),
        )


def _warn_of_tokenizers(manifests: Mapping[Path, Manifest]) -> None:
    if len({manifest.tokenizer.fingerprint for manifest in manifests.values()}) > 1:
        say(
            f"warning: {', '.join(map(str, manifests))} are counted in tokens of different tokenizers: "
            "accepted lengths are not comparable",
            err=True,
        )

"""Replays of a registered recording with a new build and the live one, in turn, in one process.

Both builds meet the same machine: each output is replayed with one, then with the other, and the next in the opposite
order. All rounds ask the same lookups, and each counts as in its fastest round: neither files that were not in memory
nor a busy machine, which interrupts one lookup of a hundred, then decide about the p99.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from draftstore.decoding.replay import ReplayResult, read_recordings, replay_in_turn
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, ReplayError
from draftstore.storage.lease import StoreLease
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.stores.registry import kind_of, open_store
from draftstore.text.tokenizer import load_tokenizer
from schema.gates import Candidate
from schema.recordings import Replayed, Rule

ROUNDS = 3
"""How often a recording is replayed."""
Measure = Callable[[Rule, Sequence[Candidate]], list[Replayed]]
"""Replays a recording with some builds; see `measure`."""


class _Open(NamedTuple):
    """An open build: its drafter, and how that drafts."""

    drafter: Drafter
    strategy: str


def measure(rule: Rule, builds: Sequence[Candidate]) -> list[Replayed]:
    """Replay a recording with some builds in turn; nothing that goes wrong raises.

    Args:
        rule: the recording.
        builds: the new build, and the live one if there is one.

    Returns:
        What each build did, or why that is not known.
    """
    new = builds[0]
    if skipped := _needs_model(new):
        return [Replayed(rule, skipped=skipped) for _ in builds]
    with ExitStack() as opened:
        found = [_open(rule, build, new, opened) for build in builds]
        drafting = [each for each in found if isinstance(each, _Open)]
        try:
            if isinstance(found[0], str):
                raise ReplayError(found[0])  # told as a recording is that cannot be read
            made = iter(_replay(rule, Path(new.path), drafting))
        except (DraftstoreError, OSError) as error:
            problem = f"{rule.name} cannot be replayed: {error}"
            return [Replayed(rule, problem=problem) for _ in builds]
        return [next(made) if isinstance(each, _Open) else Replayed(rule, skipped=each) for each in found]


def _needs_model(build: Candidate) -> str | None:
    """Return why stores of some kinds are not replayed here."""
    kind = kind_of(build.kind)
    if kind.strategies and not kind.needs_states:
        return None
    return (
        f"build {build.id}, a {build.kind} store, drafts with its model, which is not loaded here: see `draftstore "
        "replay --target-model`"
    )


def _open(rule: Rule, build: Candidate, new: Candidate, opened: ExitStack) -> _Open | str:
    """Open a build for drafting, or return why that cannot be."""
    if skipped := _needs_model(build):
        return skipped
    if build.manifest["tokenizer"]["fingerprint"] != new.manifest["tokenizer"]["fingerprint"]:
        return f"builds {new.id} and {build.id} count tokens of different tokenizers"
    try:
        opened.callback(StoreLease(Path(build.path)).close)
        store = open_store(build.path)
        opened.callback(store.close)
        drafter = store.drafter(store.default_strategy)
        drafter.warm_up()
    except (DraftstoreError, OSError) as error:
        return f"build {build.id} cannot be opened: {error}"
    if not rule.request:
        return _Open(drafter, store.default_strategy)
    request = RequestDrafter(store.manifest.vocab_size)
    mixture = Mixture([request, drafter])
    request.warm_up()
    mixture.warm_up()
    return _Open(mixture, f"{store.default_strategy} + request")


def _replay(rule: Rule, store: Path, builds: Sequence[_Open]) -> list[Replayed]:
    """Replay a recording with open builds of one tokenizer.

    Raises:
        ReplayError: the file is missing or broken, or has no output of two tokens.
        TokenizerError: the tokenizer in the store cannot be loaded.
    """
    tokenizer = load_tokenizer(store / TOKENIZER_FOLDER)
    recordings = list(read_recordings(rule.path, tokenizer, model=rule.model, limit=rule.rows))
    drafters = [build.drafter for build in builds]
    rounds = [replay_in_turn(drafters, recordings, budget=rule.budget) for _ in range(ROUNDS)]
    if not rounds[0][0].passes:
        raise ReplayError(f"{rule.path} has no output of more than one token")
    return [
        Replayed(rule, build.strategy, _at_best(results))
        for build, results in zip(builds, zip(*rounds, strict=True), strict=True)
    ]


def _at_best(rounds: Sequence[ReplayResult]) -> dict[str, Any]:
    """Return the summary of a replay in which each lookup was as fast as in its fastest round."""
    fastest = [min(times) for times in zip(*(result.lookup_ns for result in rounds), strict=False)]
    return dataclasses.replace(rounds[0], lookup_ns=fastest).summary()

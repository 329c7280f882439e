"""Replays of a registered recording with a new build and the live one."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from draftstore.decoding.replay import Recording, read_recordings, replay
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, ReplayError
from draftstore.storage.locks import lease
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.stores.registry import kind_of, open_store
from draftstore.text.tokenizer import load_tokenizer
from schema.catalogue.gates import Candidate
from schema.catalogue.recordings import Replayed, ReplayRule

Measure = Callable[[ReplayRule, Sequence[Candidate]], list[Replayed]]
"""Replays a recording with some builds; see `measure`."""


def measure(rule: ReplayRule, builds: Sequence[Candidate]) -> list[Replayed]:
    """Replay a recording with some builds; failures do not raise.

    Args:
        builds: the new build, and the live one if there is one.

    Returns:
        The result of each build, or why there is none.
    """
    new = builds[0]
    if skipped := _needs_model(new):
        return [Replayed(rule, skipped=skipped) for _ in builds]
    try:
        tokenizer = load_tokenizer(Path(new.path) / TOKENIZER_FOLDER)
        outputs = list(read_recordings(rule.path, tokenizer, model=rule.model, limit=rule.rows))
        if all(len(each.output) < 2 for each in outputs):
            raise ReplayError(f"{rule.path} has no output of more than one token")
        first = _replay(rule, new, outputs)
    except (DraftstoreError, OSError) as error:
        problem = f"{rule.name} cannot be replayed with build {new.id}: {error}"
        return [Replayed(rule, problem=problem) for _ in builds]
    return [first, *(_compared(rule, build, new, outputs) for build in builds[1:])]


def _needs_model(build: Candidate) -> str | None:
    """Return why a store's kind is not replayed here; None if it is."""
    kind = kind_of(build.kind)
    if kind.strategies and not kind.needs_states:
        return None
    return (
        f"build {build.id}, a {build.kind} store, drafts with its model, which is not loaded here: see `draftstore "
        "replay --target-model`"
    )


def _compared(rule: ReplayRule, build: Candidate, new: Candidate, outputs: Sequence[Recording]) -> Replayed:
    """Replay outputs, tokenized for the new build, with another build."""
    if skipped := _needs_model(build):
        return Replayed(rule, skipped=skipped)
    if build.manifest["tokenizer"]["fingerprint"] != new.manifest["tokenizer"]["fingerprint"]:
        skipped = f"builds {new.id} and {build.id} count tokens of different tokenizers"
        return Replayed(rule, skipped=skipped)
    try:
        return _replay(rule, build, outputs)
    except (DraftstoreError, OSError) as error:
        return Replayed(rule, skipped=f"build {build.id} cannot be replayed: {error}")


def _replay(rule: ReplayRule, build: Candidate, outputs: Sequence[Recording]) -> Replayed:
    with lease(Path(build.path)), closing(open_store(build.path)) as store:
        strategy = store.default_strategy
        alone = store.drafter(strategy)
        alone.warm_up()
        drafter: Drafter = alone
        if rule.request:
            drafter = Mixture([RequestDrafter(store.manifest.vocab_size), alone])
            strategy = f"{strategy} + request"
        return Replayed(rule, strategy, replay(drafter, outputs, budget=rule.budget).summary())

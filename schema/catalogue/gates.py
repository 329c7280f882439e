"""Gates: the checks that a build must pass before a release moves to it.

Each check compares the new build with the live one and returns why the release should not move; checks are overridden
by name. Most of them compare manifests. `removed` compares documents with those removed from collections
(`schema.collections.proving`), and `replay` the accepted lengths of both builds on the recordings of the release,
which `measure` replays; it passes until then.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from draftstore.decoding.replay import Recording, read_recordings, replay
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, ReplayError, counted
from draftstore.storage.locks import lease
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.stores.registry import kind_of, open_store
from draftstore.text.tokenizer import load_tokenizer
from schema.catalogue.builds import CatalogueError
from schema.catalogue.recordings import Replayed, ReplayRule
from schema.models import Build

MAX_SHRINKAGE = 0.2
"""Share of the live build's tokens or characters that a new build may lack."""
MAX_BAD = 0.01
"""Share of the records of a corpus that may be bad."""


class Candidate(NamedTuple):
    """A finished build, independent of sessions: columns of `builds`, and what was found out about it."""

    id: int
    kind: str
    name: str
    path: str
    digest: str
    size_bytes: int
    manifest: dict[str, Any]
    replays: tuple[Replayed, ...] = ()  # with each recording of the release, in the same order for all builds
    removed: str = ""  # which documents it holds that its own collection removed, or one that shares a source
    warning: str = ""  # the same of other collections

    @classmethod
    def of(cls, build: Build) -> "Candidate":
        """Copy a finished build."""
        columns = ("id", "kind", "name", "path", "digest", "size_bytes", "manifest")
        return cls(**{name: getattr(build, name) for name in columns})

    def figure(self, part: str, name: str) -> int:
        """Return a count of the manifest; raise UnknownFigureError if it has none."""
        found = self.manifest.get(part, {}).get(name)
        if not isinstance(found, int):
            raise UnknownFigureError(f"the manifest of build {self.id} lacks the {name.replace('_', ' ')}")
        return found


class UnknownFigureError(DraftstoreError):
    """A check cannot be made because a manifest lacks the figure."""


class RefusedError(CatalogueError):
    """A build may not go live; `refusals` has the reasons by check."""

    exit_code = 3

    def __init__(
        self, release: str, refusals: Mapping[str, str], new: Candidate, live: Candidate | None = None
    ) -> None:
        reasons = "; ".join(f"{check}: {reason}" for check, reason in refusals.items())
        super().__init__(
            f"build {new.id} does not go live as {release}: {reasons}; if that is intended, override "
            + ",".join(refusals),
            "force",
        )
        self.refusals = dict(refusals)
        self.new, self.live = new, live


class Verdict(NamedTuple):
    """The result of all checks: sentences, by name, for those that failed, were overridden, were not made, or warn."""

    refused: dict[str, str]
    forced: dict[str, str]
    skipped: dict[str, str]
    warned: dict[str, str]

    def sentences(self) -> list[str]:
        """Return one sentence for each check that did not pass."""
        return [
            f"{check} {how}: {reason}"
            for how, reasons in zip(("refused", "overridden", "not checked", "warning"), self, strict=True)
            for check, reason in reasons.items()
        ]


def judge(
    new: Candidate, live: Candidate | None, force: Collection[str], checks: "Mapping[str, Check]"
) -> Verdict:
    """Run checks; raise CatalogueError if a name in `force` is not that of one of them."""
    unknown = sorted(set(force) - checks.keys())
    if unknown:
        raise CatalogueError(f"not a check: {', '.join(unknown)}; expected {', '.join(checks)}")
    verdict = Verdict({}, {}, {}, {"removed": new.warning} if new.warning else {})
    for name, check in checks.items():
        try:
            reason = check(new, live)
        except UnknownFigureError as error:
            verdict.skipped[name] = str(error)
            continue
        if reason is not None:
            (verdict.forced if name in force else verdict.refused)[name] = reason
    return verdict


def replay_rows(new: Candidate, live: Candidate | None) -> list[dict[str, Any]]:
    """Return the replays of a new build and the live one as JSON values.

    Each row has `recording`, `as` (`live` or `new`), `build` and `accepted_length`, and `least_length`, which a new
    build must reach (None: nothing to compare with).
    """
    rows = []
    for place, mine in enumerate(new.replays):
        theirs = live.replays[place] if live and live.replays else None
        length = theirs.accepted_length if theirs else None
        least = None if length is None else (1 - mine.rule.tolerance) * length
        for role, build, result in (("live", live, theirs), ("new", new, mine)):
            if build and result and result.summary:
                named = {"recording": mine.rule.name, "as": role, "build": build.id}
                rows.append(named | {"accepted_length": result.accepted_length, "least_length": least})
    return rows


def measure(rule: ReplayRule, builds: Sequence[Candidate]) -> list[Replayed]:
    """Replay a recording with the new build and, if there is one, the live one; return why if one cannot be."""
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
    return [first, *(_replay_live(rule, build, new, outputs) for build in builds[1:])]


def _needs_model(build: Candidate) -> str | None:
    kind = kind_of(build.kind)
    if kind.strategies and not kind.needs_states:
        return None
    return (
        f"build {build.id}, a {build.kind} store, drafts with its model, which is not loaded here: see `draftstore "
        "replay --target-model`"
    )


def _replay_live(
    rule: ReplayRule, build: Candidate, new: Candidate, outputs: Sequence[Recording]
) -> Replayed:
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


Check = Callable[[Candidate, Candidate | None], str | None]


def _same_tokenizer(new: Candidate, live: Candidate) -> str | None:
    if new.manifest["tokenizer"]["fingerprint"] == live.manifest["tokenizer"]["fingerprint"]:
        return None
    return f"{_tokenizer(new)}, and the live build {live.id} has {_tokenizer(live)}"


def _tokenizer(build: Candidate) -> str:
    identity = build.manifest["tokenizer"]
    return f"tokenizer {identity['name']!r} ({identity['fingerprint'][:12]})"


def _same_model(new: Candidate, live: Candidate) -> str | None:
    found, expected = new.manifest.get("target_model"), live.manifest.get("target_model")
    if found == expected or None in (found, expected):  # without a model: a store of another kind
        return None
    return f"made for the model {found!r}, and the live build {live.id} for {expected!r}"


def _same_kind(new: Candidate, live: Candidate) -> str | None:
    if new.kind == live.kind:
        return None
    return f"a {new.kind} store, and the live build {live.id} is a {live.kind} store"


def _same_strategy(new: Candidate, live: Candidate) -> str | None:
    lost = sorted(set(kind_of(live.kind).strategies) - set(kind_of(new.kind).strategies))
    if not lost:
        return None
    return f"clients of build {live.id} may request {', '.join(lost)}, which it does not support"


def _shrinkage(new: Candidate, live: Candidate, part: str, name: str) -> str | None:
    found, expected = new.figure(part, name), live.figure(part, name)
    if found >= (1 - MAX_SHRINKAGE) * expected:
        return None
    share = 1 - found / expected
    return f"{found:,} {name}, {share:.1%} fewer than the {expected:,} of the live build {live.id}"


def _few_bad_records(new: Candidate, _live: Candidate | None) -> str | None:
    bad = new.figure("corpus", "bad_records")
    records = bad + new.figure("corpus", "empty_documents") + new.figure("counts", "documents")
    if bad <= MAX_BAD * records:
        return None
    return f"{counted(bad, 'bad record')} of {records:,}, {bad / records:.1%}; {MAX_BAD:.0%} allowed"


def _as_long(new: Candidate, live: Candidate | None) -> str | None:
    if problems := [result.problem for result in new.replays if result.problem]:
        return "; ".join(problems)
    pairs = list(zip(new.replays, live.replays, strict=False)) if live else []
    shorter = [_shorter(mine, theirs) for mine, theirs in pairs if mine.summary and theirs.summary]
    skipped = {result.skipped: None for pair in pairs for result in pair if result.skipped}
    if skipped and not any(shorter):
        raise UnknownFigureError("; ".join(skipped))
    return "; ".join(filter(None, shorter)) or None


def _shorter(new: Replayed, live: Replayed) -> str | None:
    found, expected = new.accepted_length or 0.0, live.accepted_length or 0.0
    if found >= (1 - new.rule.tolerance) * expected:
        return None
    return (
        f"{new.rule.name} has an accepted length of {found:.3f}, {1 - found / expected:.1%} below the {expected:.3f} "
        f"of the live build; {new.rule.tolerance:.1%} allowed"
    )


def _compared(check: Callable[..., str | None], **options: str) -> Check:
    """Return a check that the first build of a release passes."""
    return lambda new, live: check(new, live, **options) if live else None


ROLLBACK_CHECKS: dict[str, Check] = {"removed": lambda new, _live: new.removed or None}
"""The checks of a rollback."""
CHECKS: dict[str, Check] = {
    "tokenizer": _compared(_same_tokenizer),
    "model": _compared(_same_model),
    "kind": _compared(_same_kind),
    "strategy": _compared(_same_strategy),
    "corpus": _compared(_shrinkage, part="corpus", name="characters"),
    "tokens": _compared(_shrinkage, part="counts", name="tokens"),
    "bad-records": _few_bad_records,
    **ROLLBACK_CHECKS,
    "replay": _as_long,
}
"""The checks of a publication by the name that overrides them."""

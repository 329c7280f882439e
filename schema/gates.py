"""Gates: what a build must meet before a release moves to it.

Each check compares the new build with the live one, and returns why the release should stay where it is. Whoever
publishes may override checks by name. Most of them compare manifests. The last ones compare what both builds did with
the recordings that are registered for the release (`schema.recordings`); they pass until that was measured.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from draftstore.errors import DraftstoreError, counted
from draftstore.stores.registry import kind_of
from schema.builds import CatalogueError
from schema.models import Build
from schema.recordings import Replayed

MAX_SHRINKAGE = 0.2
"""Share of the live build's tokens or characters that a new build may lack."""
MAX_BAD = 0.01
"""Share of the records of a corpus that may be bad."""


class Candidate(NamedTuple):
    """What is checked of a finished build, independent of sessions.

    Attributes:
        id: id of the build.
        kind: kind of the store.
        name: name of the store.
        path: directory of the store.
        digest: SHA-256 of its manifest.
        size_bytes: bytes of its files.
        manifest: its manifest, JSON values.
        replays: what it did with each recording of the release; of two builds in the same order.
    """

    id: int
    kind: str
    name: str
    path: str
    digest: str
    size_bytes: int
    manifest: dict[str, Any]
    replays: tuple[Replayed, ...] = ()

    @classmethod
    def of(cls, build: Build) -> "Candidate":
        """Copy a finished build."""
        assert build.digest is not None
        assert build.size_bytes is not None
        assert build.manifest is not None
        return cls(
            build.id, build.kind, build.name, build.path, build.digest, build.size_bytes, build.manifest
        )

    def figure(self, part: str, name: str) -> int:
        """Return a count of the manifest.

        Raises:
            UnknownFigureError: this manifest has none, as those of earlier versions.
        """
        found = self.manifest.get(part, {}).get(name)
        if not isinstance(found, int):
            raise UnknownFigureError(
                f"the manifest of build {self.id} does not tell the {name.replace('_', ' ')}"
            )
        return found


class UnknownFigureError(DraftstoreError):
    """A check cannot be made: a manifest lacks the figure."""


class RefusedError(CatalogueError):
    """A build may not go live.

    Attributes:
        refusals: the reasons by check.
        new: the build, with its replays.
        live: the live build with its replays; None: there is none.
    """

    exit_code = 3

    def __init__(
        self, message: str, refusals: Mapping[str, str], new: Candidate, live: Candidate | None = None
    ) -> None:
        super().__init__(message)
        self.refusals = dict(refusals)
        self.new, self.live = new, live


class Verdict(NamedTuple):
    """The result of all checks: sentences by the name of the check.

    Attributes:
        refused: checks that the build fails.
        forced: checks that it fails and that were overridden.
        skipped: checks that could not be made.
    """

    refused: dict[str, str]
    forced: dict[str, str]
    skipped: dict[str, str]

    def sentences(self) -> list[str]:
        """Return what people should know, one sentence for each check that was not passed."""
        return [
            f"{check} {how}: {reason}"
            for how, reasons in zip(("refused", "overridden", "not checked"), self, strict=True)
            for check, reason in reasons.items()
        ]

    def require(self, release: str, new: Candidate, live: Candidate | None) -> None:
        """Refuse the build unless every check is passed, skipped or overridden.

        Raises:
            RefusedError: a check is not passed.
        """
        if self.refused:
            reasons = "; ".join(f"{check}: {reason}" for check, reason in self.refused.items())
            raise RefusedError(
                f"build {new.id} does not go live as {release}: {reasons}; if that is meant, override it with "
                f"--force {','.join(self.refused)}",
                self.refused,
                new,
                live,
            )


def judge(new: Candidate, live: Candidate | None, force: Collection[str] = ()) -> Verdict:
    """Make all checks.

    Args:
        new: the build that shall go live.
        live: the build that is live; None: there is none, or it is the same.
        force: names of checks to override.

    Raises:
        CatalogueError: there is no check of a name in `force`.
    """
    unknown = sorted(set(force) - CHECKS.keys())
    if unknown:
        raise CatalogueError(f"there is no check {', '.join(unknown)}: expected {', '.join(CHECKS)}")
    verdict = Verdict({}, {}, {})
    for name, check in CHECKS.items():
        try:
            reason = check(new, live)
        except UnknownFigureError as error:
            verdict.skipped[name] = str(error)
            continue
        if reason is not None:
            (verdict.forced if name in force else verdict.refused)[name] = reason
    return verdict


def replay_rows(new: Candidate, live: Candidate | None) -> list[dict[str, Any]]:
    """Return what a new build and the live one did with each recording, as JSON values, without what was not replayed.

    Each row has `recording`, `as` (`live` or `new`), `build`, `accepted_length`, `p99_us` and `bytes`, and the limits
    of a new build: `least_length` and `most_us` (None: nothing to compare with) and `max_bytes`.
    """
    rows = []
    for place, mine in enumerate(new.replays):
        theirs = live.replays[place] if live and live.replays else None
        length, p99 = (theirs.accepted_length, theirs.p99_us) if theirs else (None, None)
        limits = {
            "least_length": None if length is None else (1 - mine.rule.tolerance) * length,
            "most_us": None if p99 is None else mine.rule.slowdown * p99,
            "max_bytes": mine.rule.max_bytes,
        }
        for which, build, replay in (("live", live, theirs), ("new", new, mine)):
            if build and replay and replay.summary:
                figures = {"accepted_length": replay.accepted_length, "p99_us": replay.p99_us}
                named = {"recording": mine.rule.name, "as": which, "build": build.id}
                rows.append(named | figures | {"bytes": build.size_bytes} | limits)
    return rows


Check = Callable[[Candidate, Candidate | None], str | None]


def _same_tokenizer(new: Candidate, live: Candidate | None) -> str | None:
    if live is None or new.manifest["tokenizer"]["fingerprint"] == live.manifest["tokenizer"]["fingerprint"]:
        return None
    return f"{_tokenizer(new)}, and the live build {live.id} has {_tokenizer(live)}"


def _tokenizer(build: Candidate) -> str:
    identity = build.manifest["tokenizer"]
    return f"tokenizer {identity['name']!r} ({identity['fingerprint'][:12]})"


def _same_model(new: Candidate, live: Candidate | None) -> str | None:
    if live is None:
        return None
    found, expected = new.manifest.get("target_model"), live.manifest.get("target_model")
    if found == expected or None in (found, expected):  # a store of no model is one of another kind
        return None
    return f"made for the model {found!r}, and the live build {live.id} for {expected!r}"


def _same_kind(new: Candidate, live: Candidate | None) -> str | None:
    if live is None or new.kind == live.kind:
        return None
    return f"a {new.kind} store, and the live build {live.id} is a {live.kind} store"


def _same_strategy(new: Candidate, live: Candidate | None) -> str | None:
    if live is None:
        return None
    if new.kind != live.kind:
        lost = sorted(set(kind_of(live.kind).strategies) - set(kind_of(new.kind).strategies))
        return (
            f"clients of build {live.id} may ask for {', '.join(lost)}, which it does not know"
            if lost
            else None
        )
    found, expected = (build.manifest["parameters"].get("selection") for build in (new, live))
    if found == expected:
        return None
    return f"its n-grams are selected by {found!r}, and those of the live build {live.id} by {expected!r}"


def _as_many_characters(new: Candidate, live: Candidate | None) -> str | None:
    return _shrinkage(new, live, "corpus", "characters")


def _as_many_tokens(new: Candidate, live: Candidate | None) -> str | None:
    return _shrinkage(new, live, "counts", "tokens")


def _shrinkage(new: Candidate, live: Candidate | None, part: str, name: str) -> str | None:
    """Compare a figure; without a live build there is nothing to compare with."""
    if live is None:
        return None
    found, expected = new.figure(part, name), live.figure(part, name)
    if found >= (1 - MAX_SHRINKAGE) * expected:
        return None
    share = 1 - found / expected
    return f"{found:,} {name}, {share:.0%} fewer than the {expected:,} of the live build {live.id}"


def _few_bad_records(new: Candidate, live: Candidate | None) -> str | None:  # noqa: ARG001
    bad = new.figure("corpus", "bad_records")
    records = bad + new.figure("corpus", "empty_documents") + new.figure("counts", "documents")
    if bad <= MAX_BAD * records:
        return None
    return f"{counted(bad, 'bad record')} of {records:,}, {bad / records:.1%}, where {MAX_BAD:.0%} may be"


def _not_too_large(new: Candidate, live: Candidate | None) -> str | None:  # noqa: ARG001
    caps = [
        replay.rule for replay in new.replays if (replay.rule.max_bytes or new.size_bytes) < new.size_bytes
    ]
    if not caps:
        return None
    lowest = min(caps, key=lambda rule: rule.max_bytes or 0)
    return f"{new.size_bytes:,} bytes, where {lowest.name} allows {lowest.max_bytes:,}"


def _as_long(new: Candidate, live: Candidate | None) -> str | None:
    problems = [replay.problem for replay in new.replays if replay.problem]
    return "; ".join(problems) or _compared(new, live, _shorter)


def _as_fast(new: Candidate, live: Candidate | None) -> str | None:
    return _compared(new, live, _slower)


def _compared(
    new: Candidate, live: Candidate | None, worse: Callable[[Replayed, Replayed], str | None]
) -> str | None:
    """Compare what two builds did with each recording, as far as both were replayed.

    Raises:
        UnknownFigureError: they are as good as each other where they were replayed, and some replay is missing.
    """
    pairs = list(zip(new.replays, live.replays, strict=False)) if live else []
    reasons = [worse(mine, theirs) for mine, theirs in pairs if mine.summary and theirs.summary]
    skipped = {replay.skipped: None for pair in pairs for replay in pair if replay.skipped}
    if skipped and not any(reasons):
        raise UnknownFigureError("; ".join(skipped))
    return "; ".join(filter(None, reasons)) or None


def _shorter(new: Replayed, live: Replayed) -> str | None:
    found, expected = new.accepted_length or 0.0, live.accepted_length or 0.0
    if found >= (1 - new.rule.tolerance) * expected:
        return None
    return (
        f"{new.rule.name} has an accepted length of {found:.3f}, {1 - found / expected:.1%} below the {expected:.3f} "
        f"of the live build, where {new.rule.tolerance:.1%} may be"
    )


def _slower(new: Replayed, live: Replayed) -> str | None:
    found, expected = new.p99_us or 0.0, live.p99_us or 0.0
    if found <= new.rule.slowdown * expected:
        return None
    return (
        f"{new.rule.name} has a p99 of {found:,.0f} µs a lookup, {found / expected:.1f} times the {expected:,.0f} µs "
        f"of the live build, where {new.rule.slowdown:g} times may be"
    )


CHECKS: dict[str, Check] = {
    "tokenizer": _same_tokenizer,
    "model": _same_model,
    "kind": _same_kind,
    "strategy": _same_strategy,
    "corpus": _as_many_characters,
    "tokens": _as_many_tokens,
    "bad-records": _few_bad_records,
    "bytes": _not_too_large,
    "replay": _as_long,
    "latency": _as_fast,
}
"""All checks by the name that overrides them."""

"""Gates: what a build must meet before a release moves to it.

Each check compares the new build with the live one, and returns why the release should stay where it is. Whoever
publishes may override checks by name. A gate of another kind, such as a replay, is one more entry in `CHECKS`: checks
run before the transaction that moves the release, so that one may take its time.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from draftstore.errors import DraftstoreError, counted
from draftstore.stores.registry import kind_of
from schema.builds import CatalogueError
from schema.models import Build

MOST_SHRINKAGE = 0.2
"""Share of the live build's tokens or characters that a new build may lack."""
MOST_BAD = 0.01
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
    """

    id: int
    kind: str
    name: str
    path: str
    digest: str
    size_bytes: int
    manifest: dict[str, Any]

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
    """A build may not go live, see `refusals`: the reasons by check."""

    exit_code = 3

    def __init__(self, message: str, refusals: Mapping[str, str]) -> None:
        super().__init__(message)
        self.refusals = dict(refusals)


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

    def require(self, release: str, build_id: int) -> None:
        """Refuse the build unless every check is passed, skipped or overridden.

        Raises:
            RefusedError: a check is not passed.
        """
        if self.refused:
            reasons = "; ".join(f"{check}: {reason}" for check, reason in self.refused.items())
            raise RefusedError(
                f"build {build_id} does not go live as {release}: {reasons}; if that is meant, override it with "
                f"--force {','.join(self.refused)}",
                self.refused,
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
    if found >= (1 - MOST_SHRINKAGE) * expected:
        return None
    share = 1 - found / expected
    return f"{found:,} {name}, {share:.0%} fewer than the {expected:,} of the live build {live.id}"


def _few_bad_records(new: Candidate, live: Candidate | None) -> str | None:  # noqa: ARG001
    bad = new.figure("corpus", "bad_records")
    records = bad + new.figure("corpus", "empty_documents") + new.figure("counts", "documents")
    if bad <= MOST_BAD * records:
        return None
    return f"{counted(bad, 'bad record')} of {records:,}, {bad / records:.1%}, where {MOST_BAD:.0%} may be"


CHECKS: dict[str, Check] = {
    "tokenizer": _same_tokenizer,
    "model": _same_model,
    "kind": _same_kind,
    "strategy": _same_strategy,
    "corpus": _as_many_characters,
    "tokens": _as_many_tokens,
    "bad-records": _few_bad_records,
}
"""All checks by the name that overrides them."""

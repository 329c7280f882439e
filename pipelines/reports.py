"""Reports of flow runs for their pages, as text and rows: figures from manifests, and timings."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftstore.answers.responses import Responses
from draftstore.errors import counted
from draftstore.storage.manifest import Manifest
from draftstore.stores.registry import kind_of


@dataclasses.dataclass(frozen=True)
class Built:
    """A store made or found by a flow; `timings` are seconds by step, empty if it existed already."""

    build_id: int
    path: Path
    manifest: Manifest
    reused: bool
    timings: dict[str, float]

    def summary(self) -> dict[str, Any]:
        """Return a summary as JSON values."""
        return {
            "build": self.build_id,
            "kind": self.manifest.kind,
            "path": str(self.path),
            "entries": self.manifest.counts["entries"],
            "tokens": self.manifest.counts["tokens"],
            "bytes": self.manifest.size,
            "seconds": round(sum(self.timings.values()), 2),
            "reused": self.reused,
        }


def markdown(name: str, builds: Sequence[Built], release: str | None, notes: Sequence[str] = ()) -> str:
    """Return the page of a run: stores in build order, their corpus, and figures of the last one."""
    last = builds[-1]
    corpus = last.manifest.corpus
    sources = corpus.get("sources", [])
    lines = [
        f"# {last.manifest.kind} `{name}`",
        "",
        f"Build {last.build_id} in `{last.path}`"
        + (" was already finished: nothing was done." if last.reused else "."),
        *([f"The release `{release}` points at it."] if release else []),
        *(f"- {note}" for note in notes),
        "",
        "| store | build | entries | bytes | seconds |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {built.manifest.kind} | {built.build_id} | {built.manifest.counts['entries']:,} "
            f"| {built.manifest.size:,} | {_seconds(built)} |"
            for built in builds
        ),
        "",
        f"Corpus: {counted(last.manifest.counts['documents'], 'document')}, "
        f"{counted(last.manifest.counts['tokens'], 'token')} of "
        f"`{last.manifest.tokenizer.name}`, from {', '.join(f'`{source}`' for source in sources[:5])}"
        + (" and others." if len(sources) > 5 else "."),
    ]
    skipped = [
        counted(corpus[key], noun)
        for key, noun in (("bad_records", "bad record"), ("empty_documents", "empty document"))
        if corpus.get(key)
    ]
    if skipped:
        lines.append(f"Skipped: {', '.join(skipped)}.")
    if corpus.get("truncated"):
        lines.append(f"Not read to the end: {counted(corpus['truncated'], 'truncated file')}.")
    return "\n".join([*lines, *_figures(last.manifest)]) + "\n"


def refusal_markdown(release: str, built: Built, refusals: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the page of a release that stays where it is, with the reasons by check."""
    return "\n".join(
        [
            f"# Release `{release}` was not moved",
            "",
            f"Build {built.build_id} in `{built.path}` does not go live:",
            "",
            "| check | reason |",
            "|---|---|",
            *(f"| {check} | {reason.replace('|', '/')} |" for check, reason in refusals.items()),
            "",
            f"If that is meant, publish it: `draftstore releases publish {release} {built.build_id} "
            f"--force {','.join(refusals)}`, or run the flow with `force`.",
            "",
            *(f"- {note}" for note in notes),
        ]
    )


def replay_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return `schema.gates.replay_rows` as sentences."""
    return [
        f"{row['recording']}: accepted length {row['accepted_length']:.3f} with the {row['as']} build {row['build']}"
        for row in rows
    ]


def answers_markdown(name: str, model: str, answers: Sequence[Responses]) -> str:
    """Return the page of a model's answers, with what was skipped."""
    lines = [f"# Answers `{name}` of `{model}`"]
    for made in answers:
        counts = {key.replace("_", " "): number for key, number in made.counts.items() if number}
        lines += ["", f"`{made.path}`" + (" was already finished." if made.reused else "")]
        lines += ["", "| what | number |", "|---|--:|", *_rows(counts)]
        lines += [f"\n{problem.place}: {problem.reason}" for problem in made.problems[:5]]
    return "\n".join(lines) + "\n"


def _figures(manifest: Manifest) -> list[str]:
    """Return a table of a store's quality figures; empty for kinds without figures."""
    figures = kind_of(manifest.kind).figures(manifest)
    if not figures:
        return []
    return ["", "| figure | value |", "|---|--:|", *_rows(figures)]


def _rows(figures: Mapping[str, Any]) -> list[str]:
    """Return table rows: integers with thousands separators, other numbers with four decimals."""
    formats: dict[type, str] = {int: "{:,}", float: "{:.4f}"}
    return [
        f"| {key.replace('_', ' ')} | {formats.get(type(value), '{}').format(value)} |"
        for key, value in figures.items()
    ]


def _seconds(built: Built) -> str:
    return "reused" if built.reused else f"{sum(built.timings.values()):,.1f}"

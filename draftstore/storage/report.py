"""What long work reports: the progress of its steps, and what was skipped of the texts it read, and why."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

from pydantic import TypeAdapter

from draftstore.errors import counted
from draftstore.storage.files import AnyText

LINKS = "links"
"""Key in `ReadReport.passed_over` of links that lead out of their folders."""
HIDDEN = "hidden"
"""Key in `ReadReport.passed_over` of hidden and unfinished files and folders."""
MAX_PROBLEMS = 20
"""Maximum number of bad records in a report."""
FACTS = ("bad_records", "empty_documents", "filtered", "truncated", "unread", "passed_over")
"""The fields recorded as JSON values in `Manifest.corpus`; the number of documents is elsewhere in the manifest."""


class OnProgress(Protocol):
    """Takes the progress of one step."""

    def __call__(self, done: int, total: int | None, detail: str = "", /) -> None:
        """Report the amount done, the total (None if unknown), and further details."""


Progress = Callable[[str, str], OnProgress]
"""Returns the callback of a step, given its name and the unit of its amounts: `progress("sorting", "tokens")`."""


def ignore(_done: int, _total: int | None, _detail: str = "") -> None:
    """Report nothing about a step."""


def silent(_step: str, _unit: str) -> OnProgress:
    """Report nothing about any step."""
    return ignore


@dataclasses.dataclass(frozen=True)
class RecordProblem:
    """An unreadable record: its position (`file:line 7`) and the reason; `truncated` if the file ends there."""

    place: AnyText
    reason: AnyText
    truncated: bool = False


@dataclasses.dataclass
class ReadReport:
    """Running counts of what was read and skipped."""

    documents: int = 0
    bad_records: int = 0
    empty_documents: int = 0  # of only whitespace, skipped
    problems: list[RecordProblem] = dataclasses.field(default_factory=list)  # the first of the bad records
    unread: list[AnyText] = dataclasses.field(default_factory=list)  # record files without any text
    # Skipped data files in folders by suffix, and under `LINKS` and `HIDDEN`.
    passed_over: dict[AnyText, int] = dataclasses.field(default_factory=dict)
    truncated: int = 0  # or damaged files
    filtered: int = 0  # records that do not match the condition

    @classmethod
    def of_facts(cls, documents: int, corpus: Mapping[str, Any]) -> Self:
        """Return the report recorded in a manifest's `corpus`."""
        return cls(documents, **{name: corpus[name] for name in FACTS if name in corpus})

    def facts(self) -> dict[str, Any]:
        """Return the part of the report recorded in a manifest's `corpus`."""
        return {name: getattr(self, name) for name in FACTS}

    def add(self, part: "ReadReport") -> None:
        """Add what was read and skipped of a part of the corpus, except `passed_over`."""
        self.documents += part.documents
        self.bad_records += part.bad_records
        self.empty_documents += part.empty_documents
        self.truncated += part.truncated
        self.filtered += part.filtered
        self.problems = [*self.problems, *part.problems][:MAX_PROBLEMS]
        self.unread = [*self.unread, *part.unread]

    def add_problem(self, problem: RecordProblem) -> None:
        """Count a bad record, and keep it if it is among the first."""
        self.bad_records += 1
        self.truncated += problem.truncated
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def absence(self) -> str:
        """Describe why there is no text; return an empty string if there was nothing to read."""
        reasons = []
        if self.empty_documents:
            reasons.append(counted(self.empty_documents, "empty document"))
        if self.filtered:
            reasons.append(f"{counted(self.filtered, 'record')} did not match `where`")
        if self.bad_records:
            first = "the first " if self.bad_records > 1 else ""
            place = f", {first}{self.problems[0].place}: {self.problems[0].reason}"
            reasons.append(counted(self.bad_records, "bad record") + place)
        if self.passed_over:
            reasons.append(passed_over_text(self.passed_over))
        return "; ".join(reasons)


REPORTS = TypeAdapter(ReadReport)
"""Parses a report written with `dataclasses.asdict`."""


def passed_over_text(skipped: Mapping[str, int]) -> str:
    """Describe what was skipped in folders, and what to do about it."""
    endings = sorted(skipped.keys() - {LINKS, HIDDEN})
    parts = []
    if number := sum(skipped[ending] for ending in endings):
        most = max(endings, key=lambda ending: skipped[ending])
        verb, pronoun = ("was", "it") if number == 1 else ("were", "them")
        parts.append(
            f"{counted(number, 'data file')} in folders {verb} skipped ({', '.join(endings)}): "
            f"name {pronoun}, or give the glob '*{most}'"
        )
    if number := skipped.get(LINKS, 0):
        verb = "leads" if number == 1 else "lead"
        parts.append(f"{counted(number, 'link')} in folders {verb} out of them: name the files to read them")
    if number := skipped.get(HIDDEN, 0):
        files = counted(number, "hidden or unfinished file")
        parts.append(f"skipped {files} in folders: name the files to read them")
    return "; ".join(parts)

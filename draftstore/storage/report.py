"""A report on reading texts: the number of documents, and what was skipped and why."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from pydantic import TypeAdapter

from draftstore.errors import counted
from draftstore.storage.files import Text

LINKS = "links"
"""Stands for links that lead out of their folders in `ReadReport.passed_over`."""
MAX_PROBLEMS = 20
"""Maximum number of bad records in a report."""
FACTS = ("bad_records", "empty_documents", "truncated", "unread", "passed_over")
"""What a manifest says of a reading besides the number of documents: JSON values in `Manifest.corpus`."""


@dataclasses.dataclass(frozen=True)
class RecordProblem:
    """An unreadable record: its position (`file:line 7`), and the reason; `truncated` if the file ends with it."""

    place: Text
    reason: Text
    truncated: bool = False


@dataclasses.dataclass
class ReadReport:
    """Counts of a reading so far.

    Attributes:
        documents: texts read.
        empty_documents: texts with only white space, skipped.
        problems: the first `MAX_PROBLEMS` of the `bad_records`.
        unread: files of records without any text.
        passed_over: skipped data files in folders, by suffix, and links out of them, as `LINKS`.
        truncated: number of files that could not be read to their end.
    """

    documents: int = 0
    bad_records: int = 0
    empty_documents: int = 0
    problems: list[RecordProblem] = dataclasses.field(default_factory=list)
    unread: list[Text] = dataclasses.field(default_factory=list)
    passed_over: dict[Text, int] = dataclasses.field(default_factory=dict)
    truncated: int = 0

    @classmethod
    def of_facts(cls, documents: int, corpus: Mapping[str, Any]) -> Self:
        """Return the report in a manifest's `corpus`."""
        return cls(documents, **{name: corpus[name] for name in FACTS if name in corpus})

    def facts(self) -> dict[str, Any]:
        """Return the part of the report that belongs in a manifest's `corpus`."""
        return {name: getattr(self, name) for name in FACTS}

    def add(self, part: "ReadReport") -> None:
        """Add what was counted in a part of the corpus; `unread` and `passed_over` are not counts of parts."""
        self.documents += part.documents
        self.bad_records += part.bad_records
        self.empty_documents += part.empty_documents
        self.truncated += part.truncated
        self.problems = [*self.problems, *part.problems][:MAX_PROBLEMS]

    def add_problem(self, problem: RecordProblem) -> None:
        """Count a bad record, and keep it if it is among the first."""
        self.bad_records += 1
        self.truncated += problem.truncated
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def absence(self) -> str:
        """Describe why there is no text; empty if there was nothing to read."""
        reasons = []
        if self.empty_documents:
            reasons.append(counted(self.empty_documents, "empty document"))
        if self.bad_records:
            first = "the first " if self.bad_records > 1 else ""
            place = f", {first}{self.problems[0].place}: {self.problems[0].reason}"
            reasons.append(counted(self.bad_records, "bad record") + place)
        if self.passed_over:
            reasons.append(passed_over_text(self.passed_over))
        return "; ".join(reasons)


REPORTS = TypeAdapter(ReadReport)
"""Reads what `dataclasses.asdict` has written of a report."""


def passed_over_text(skipped: Mapping[str, int]) -> str:
    """Describe which data files in folders were skipped, and which links, and what to do about it."""
    endings = sorted(skipped.keys() - {LINKS})
    parts = []
    if number := sum(skipped[ending] for ending in endings):
        most = max(endings, key=lambda ending: skipped[ending])
        verb, pronoun = ("was", "it") if number == 1 else ("were", "them")
        parts.append(
            f"{counted(number, 'data file')} in folders {verb} passed over ({', '.join(endings)}): "
            f"name {pronoun}, or give --glob '*{most}'"
        )
    if number := skipped.get(LINKS, 0):
        verb = "leads" if number == 1 else "lead"
        parts.append(f"{counted(number, 'link')} in folders {verb} out of them: name the files to read them")
    return "; ".join(parts)

"""Which records of a file are read, and under which keys they have their text.

    RecordOptions(fields="prompt=input,output=output", where="score > 0")

reads the rollouts of verl that were rewarded.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field

from draftstore.errors import CorpusError, needs_extra
from draftstore.options import Options, Shown
from draftstore.storage.report import RecordProblem

PAIRS = (("prompt", "completion"), ("input", "output"), ("prompt", "output"))
"""Keys of prompts and outputs in the rollouts of TRL and verl, and in the recordings of a replay."""
BATCH = 256
"""Number of records for which a condition is evaluated at once."""

Numbered: TypeAlias = tuple[int, "dict[str, Any] | RecordProblem"]
Fields = Annotated[str, AfterValidator(lambda given: pair_of(given) and given)]
Condition = Annotated[str, AfterValidator(lambda given: _compiled(given) and given)]


class PairOptions(Options):
    """Under which keys records have a prompt and its output."""

    fields: Annotated[Fields | None, Shown(metavar="prompt=KEY,output=KEY")] = Field(
        None,
        description="Keys or columns of a prompt and its output, which are read together: texts, or lists of messages.",
        examples=["prompt=input,output=output", "prompt=prompt,output=completion"],
    )

    @property
    def pair(self) -> tuple[str, str] | None:
        """The keys of prompt and output, or None."""
        return pair_of(self.fields) if self.fields else None


class RecordOptions(PairOptions):
    """Which records are read, and under which keys they have their text."""

    column: str = Field(
        "text",
        min_length=1,
        description="Key or column of the text in a record; else `messages` or `conversations` are read.",
        examples=["text", "content"],
    )
    where: Annotated[Condition | None, Shown(metavar="SQL")] = Field(
        None,
        description="Read only records for which this SQL expression over their keys is true.",
        examples=["score > 0", "score > 0 AND step >= 100"],
    )

    @property
    def compared(self) -> list[str]:
        """The keys that the condition names."""
        return _compiled(self.where)[1] if self.where else []

    @property
    def deciding(self) -> dict[str, str]:
        """What determines the documents of a file, as JSON values."""
        return self.model_dump(include=set(RecordOptions.model_fields), exclude_none=True)

    def refuse(self, what: str) -> None:
        """Raise a CorpusError if these options need records with keys, which `what` does not have."""
        for option in ("where", "fields"):
            if getattr(self, option):
                raise CorpusError(f"{what} has no records with keys: leave it out, or the option", option)


TEXTS = RecordOptions()
"""All records, with texts under `text`, or conversations."""


def pair_of(fields: str) -> tuple[str, str]:
    """Return the keys of prompt and output; ValueError if these are not named."""
    names = dict(part.strip().partition("=")[::2] for part in fields.split(","))
    if set(names) != {"prompt", "output"} or not all(names.values()):
        raise ValueError("must name two keys, as in prompt=input,output=output")
    return names["prompt"], names["output"]


def advice(names: Container[str]) -> str:
    """Return how to read records with these keys, or an empty string."""
    pair = next((pair for pair in PAIRS if all(name in names for name in pair)), None)
    return f"add --fields prompt={pair[0]},output={pair[1]}" if pair else ""


def _compiled(where: str) -> tuple[Any, list[str]]:
    """Return a condition as an expression of polars, and the keys that it names; ValueError if it is none."""
    with needs_extra("polars"):
        import polars as pl
    try:
        expression = pl.sql_expr(where)
        keys = list(dict.fromkeys(expression.meta.root_names()))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"is not an SQL expression: {str(error).splitlines()[0]}") from None
    if not keys:
        raise ValueError("must name a key of the records, such as 'score > 0'")
    return expression, keys


def select(
    numbered: Iterator[Numbered], where: str | None, path: Path, unit: str
) -> Iterator[tuple[int, Any]]:
    """Yield numbered records of a file, with None for those that do not match a condition.

    A key that no record has is null, and reported at the end; `unit` is "line" or "row", for the place of a record
    whose value cannot be compared. CorpusError if the condition cannot be evaluated for any record.
    """
    if not where:
        yield from numbered
        return
    expression, keys = _compiled(where)
    number, known, missing, sample = 0, "", set(keys), dict[str, Any]()
    while part := list(islice(numbered, BATCH)):
        records = [record for _, record in part if isinstance(record, dict)]
        known = known or ", ".join(next(iter(records), ""))
        missing.difference_update(*records)
        for key in keys:  # the type of a key that is null in a whole batch is that of its first value
            values = (record.get(key) for record in [sample, *records])
            sample[key] = next((value for value in values if value is not None), None)
        try:
            matches = iter(_decided(records, sample, expression, keys, is_first=number == 0))
        except CorpusError as error:
            raise CorpusError(f"{path}: {error}", "where") from None
        for number, record in part:
            match = record if isinstance(record, RecordProblem) else next(matches)
            if isinstance(match, str):
                match = RecordProblem(f"{path}:{unit} {number}", match)
            yield number, match if isinstance(match, RecordProblem) else record if match else None
    if known and missing:
        absent = ", ".join(sorted(missing))
        yield (
            number + 1,
            RecordProblem(str(path), f"no record has {absent}, only {known}: `where` took it for null"),
        )


def _decided(
    records: Sequence[Mapping[str, Any]], sample: Mapping[str, Any], expression: Any, keys: Sequence[str], *,
    is_first: bool,
) -> list[bool | str]:  # fmt: skip
    """Return whether a condition is true for each record, or why it cannot be evaluated for one."""
    try:
        return [*_matches([sample, *records], expression, keys)[1:]]
    except CorpusError:
        problems = [_problem(record, expression, keys) for record in records]
        good = [record for record, problem in zip(records, problems, strict=True) if not problem]
        if is_first and not good:  # the condition is wrong, not a value
            raise
        matches = iter(_matches(good, expression, keys))
        return [problem or next(matches) for problem in problems]


def _problem(record: Mapping[str, Any], expression: Any, keys: Sequence[str]) -> str:
    try:
        _matches([record], expression, keys)
    except CorpusError as error:
        return str(error)
    return ""


def _matches(records: Sequence[Mapping[str, Any]], expression: Any, keys: Sequence[str]) -> list[bool]:
    """Return whether a condition is true for each of some records; null and NaN are unknown, which is not true."""
    import polars as pl

    for null in (pl.Null, pl.String):  # functions of text refuse a column of nulls alone
        try:
            frame = pl.DataFrame(
                [pl.Series(key, [row.get(key) for row in records], strict=False) for key in keys]
            )
            frame = frame.fill_nan(None).with_columns(pl.col(pl.Null).cast(null))
            # Each record as a group of its own: a mean would otherwise be that of a batch.
            alone = expression.over(pl.int_range(pl.len()))
            found = frame.select(alone=alone, together=expression)
            break
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
            problem = str(error).splitlines()[0]
    else:
        raise CorpusError(f"the condition cannot be evaluated: {problem}")
    if found["alone"].dtype not in (pl.Boolean, pl.Null):
        raise CorpusError("the condition gives a value, expected true or false, such as 'score > 0'")
    if not found["alone"].equals(found["together"]):
        raise CorpusError("the condition compares records with others, expected one over a single record")
    return [match is True for match in found["alone"]]

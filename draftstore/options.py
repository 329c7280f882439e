"""Options, each defined once: models whose fields the command line, the flows and the builders read.

    class RestOptions(Options):
        segment_tokens: int = Field(SEGMENT_TOKENS, ge=2, description="Maximum number of tokens in a suffix array.")
        workers: Annotated[int | None, Shown(unset="all cores")] = Field(None, ge=1, description="...")

`draftstore.cli.options` makes options of a command of them, `pipelines` parameters of a flow.
"""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from draftstore.errors import DraftstoreError

SIZE = re.compile(r"\s*\d+(\.\d+)?\s*[A-Za-z]*\s*")


class OptionsError(DraftstoreError, ValueError):
    """A value is out of bounds, or two options exclude each other; the message names the option."""


def _whole(value: Any) -> Any:
    """Refuse text of which pydantic would read the beginning alone."""
    if isinstance(value, str) and not SIZE.fullmatch(value):
        raise ValueError("expected a size in bytes, such as 100MB, 1.5GiB or 65536")
    return value


Bytes = Annotated[ByteSize, BeforeValidator(_whole)]
"""A number of bytes, which may be written as `100MB` or `1.5GiB`."""
BYTES: TypeAdapter[int] = TypeAdapter(Bytes)


UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _length(value: Any) -> Any:
    """Read a length of time as people write it."""
    if isinstance(value, timedelta):
        return value
    found = re.fullmatch(r"(\d{1,6})([smhdw])", str(value))
    if not found:
        raise ValueError("expected a length of time, such as 90m, 12h, 7d or 2w")
    return timedelta(**{UNITS[found[2]]: int(found[1])})


Duration = Annotated[timedelta, BeforeValidator(_length)]
"""A length of time, which may be written as `90m`, `12h`, `7d` or `2w`."""
LENGTH: TypeAdapter[timedelta] = TypeAdapter(Duration)


def parsed(parse: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that reads a value from text; others stay as they are."""
    return BeforeValidator(lambda given: parse(given) if isinstance(given, str) else given)


class Shown(NamedTuple):
    """How people see a field, where its name, type, description and default do not suffice.

    Attributes:
        unset: what the default means, such as `all cores`.
        metavar: placeholder of the value in help.
        flags: names on the command line, in place of that of the field; `--a/--b` for a choice of two.
        variable: environment variable that holds the value.
        choices: allowed values, where the type cannot list them.
        alone: what the option means without a value; None: it needs one.
        hidden: whether only Python code sets it.
        expert: whether few need it: help lists it last.
    """

    unset: str = ""
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    variable: str | None = None
    choices: tuple[str, ...] = ()
    alone: int | None = None
    hidden: bool = False
    expert: bool = False

    @classmethod
    def of(cls, field: FieldInfo) -> Self:
        """Return how people see a field."""
        return next((each for each in field.metadata if isinstance(each, cls)), cls())


EXPERT = Shown(expert=True)


class Options(BaseModel):
    """Base of all options: immutable, without unknown fields; an invalid value raises an OptionsError."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        """Check the values."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise OptionsError(sentence(error)) from None

    def plan(self, *without: str) -> dict[str, Any]:
        """Return the fields that are not named as JSON values, under the names of plans and manifests."""
        return self.model_dump(mode="json", exclude=set(without))

    @classmethod
    def of(cls, other: "Options", **changes: Any) -> Self:
        """Return options with what another model shares with this one, and some changes."""
        return cls.take(dict(other), **changes)

    @classmethod
    def take(cls, values: Mapping[str, Any], **changes: Any) -> Self:
        """Return options with those values that are of this model, and some changes."""
        return cls(**{name: values[name] for name in cls.model_fields if name in values} | changes)

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked."""
        return type(self)(**{**dict(self), **changes})


def sentence(error: ValidationError, *, values: bool = True) -> str:
    """Return all that is wrong as one sentence, with the invalid values unless they may be secret.

    An example: `max_n: must be greater than or equal to 1, not 0`.
    """
    return "; ".join(_problem(each, values) for each in error.errors(include_url=False))


def worded(problem: Any) -> str:
    """Return the message of one of pydantic's problems in the words of a person."""
    if problem["type"] == "extra_forbidden":
        return "unknown field"
    return str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")


def _problem(problem: Any, values: bool) -> str:
    message = worded(problem)
    if not problem["loc"]:
        return message
    shown = values and problem["type"] not in ("missing", "extra_forbidden")
    given = f", not {problem['input']!r}" if shown else ""
    return f"{'.'.join(map(str, problem['loc']))}: {message}{given}"

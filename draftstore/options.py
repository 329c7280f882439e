"""Options, each defined once: models whose fields are read by the command line, the flows and the builders.

    class RestOptions(Options):
        segment_tokens: int = Field(SEGMENT_TOKENS, ge=2, description="Maximum number of tokens in a suffix array.")
        workers: Annotated[int | None, Shown(unset="all cores")] = Field(None, ge=1, description="...")

`draftstore.cli.options` turns them into options of a command, `pipelines` into parameters of a flow.
"""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from draftstore.errors import DraftstoreError, type_name

SIZE = re.compile(r"\s*\d+(\.\d+)?\s*[A-Za-z]*\s*")


class OptionsError(DraftstoreError, ValueError):
    """Values are out of bounds or mutually exclusive; `problems` has each with its option, or "" for several."""

    def __init__(self, *problems: tuple[str, str]) -> None:
        self.problems = problems
        super().__init__(*problems)  # type: ignore[arg-type]

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return all problems as one sentence, with the options as users spell them."""
        return "; ".join(f"{spell(option)}: {what}" if option else what for option, what in self.problems)


def _whole(value: Any) -> Any:
    """Refuse text of which pydantic would parse only the beginning."""
    if isinstance(value, str) and not SIZE.fullmatch(value):
        raise ValueError("expected a size in bytes, such as 100MB, 1.5GiB or 65536")
    return value


Bytes = Annotated[ByteSize, BeforeValidator(_whole)]
"""A number of bytes; may be written as `100MB` or `1.5GiB`."""
BYTES: TypeAdapter[int] = TypeAdapter(Bytes)


CONTAINERS = "dict_type", "mapping_type", "model_type", "list_type", "tuple_type"
"""Problems of values that should contain others."""
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _length(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    found = re.fullmatch(r"(\d{1,6})([smhdw])", str(value))
    if not found:
        raise ValueError("expected a duration, such as 90m, 12h, 7d or 2w")
    return timedelta(**{UNITS[found[2]]: int(found[1])})


Duration = Annotated[timedelta, BeforeValidator(_length)]
"""A duration; may be written as `90m`, `12h`, `7d` or `2w`."""
LENGTH: TypeAdapter[timedelta] = TypeAdapter(Duration)


def parsed(parse: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that parses text; values that are parsed already are left alone."""

    def read(given: Any) -> Any:
        if isinstance(given, str):
            return parse(given)
        if type(given) in (list, dict):
            raise ValueError("must be text")
        return given

    return BeforeValidator(read)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")  # noqa: TRY004 (pydantic collects it)
    return value


Number = BeforeValidator(_number)
"""Refuses true and false, which pydantic takes for 1 and 0: for numbers of a settings file."""


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}"
"""Names of releases, collections, live stores and served stores."""


def require_name(name: str, what: str, error: type[DraftstoreError] = DraftstoreError) -> None:
    """Refuse a new name of `what` that is not a `NAME`."""
    if not re.fullmatch(NAME, name):
        raise error(
            f"{name!r} cannot be the name of {what}: expected at most 62 letters, digits, '.', '_' and '-', with a "
            "letter or digit first"
        )


class Shown(NamedTuple):
    """How a field is presented to users if its name, type, description and default do not suffice.

    Attributes:
        unset: what the default means, such as `all cores`.
        metavar: placeholder of the value in help.
        flags: names on the command line instead of the field's; `--a/--b` for a choice of two.
        variable: environment variable that holds the value.
        choices: allowed values, if the type cannot list them.
        alone: value of the option if given without one; None: it requires a value.
        hidden: whether only Python code sets it.
        expert: whether only few users need it; help lists it last.
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
        """Return the presentation of a field."""
        return next((each for each in field.metadata if isinstance(each, cls)), cls())


EXPERT = Shown(expert=True)


class Options(BaseModel):
    """Base of all options: immutable, unknown fields forbidden; an invalid value raises an OptionsError."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        """Validate the values."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise OptionsError(*problems_of(error)) from None

    def plan(self, *without: str) -> dict[str, Any]:
        """Return all fields except those named as JSON values, under the names used in plans and manifests."""
        return self.model_dump(mode="json", exclude=set(without))

    @classmethod
    def of(cls, other: "Options", **changes: Any) -> Self:
        """Return options with the fields that another model shares with this one, and some changes."""
        return cls.take(dict(other), **changes)

    @classmethod
    def take(cls, values: Mapping[str, Any], **changes: Any) -> Self:
        """Return options with the values that are fields of this model, and some changes."""
        return cls(**{name: values[name] for name in cls.model_fields if name in values} | changes)

    def changed(self, **changes: Any) -> Self:
        """Return a copy with changed values, which are validated."""
        return type(self)(**{**dict(self), **changes})


def sentence(error: ValidationError, *, values: bool = True, most: int | None = None) -> str:
    """Return all or the first problems as one sentence, with the invalid values unless they may be secret.

    Example: `max_n: must be greater than or equal to 1, not 0`.
    """
    return str(OptionsError(*problems_of(error, values=values)[:most]))


def problems_of(error: ValidationError, *, values: bool = True) -> list[tuple[str, str]]:
    """Return each problem with the place of its field, such as `corpora.acme.budget`; see `sentence`."""
    found = []
    for each in error.errors(include_url=False):
        place = ".".join(map(str, each["loc"]))
        inner = each.get("ctx", {}).get("error")
        if isinstance(inner, OptionsError):  # of a model inside this one
            found += [(".".join(filter(None, (place, option))), what) for option, what in inner.problems]
        else:
            shown = place and values and each["type"] not in ("missing", "extra_forbidden")
            found.append((place, worded(each) + (f", not {_given(each)}" if shown else "")))
    return found


def _given(problem: Any) -> str:
    """Return the invalid value, or only its type if it is or should be a container: parts of it may be secret."""
    value = problem["input"]
    hidden = problem["type"] in CONTAINERS or isinstance(value, list | tuple | dict)
    return type_name(value) if hidden else repr(value)


def worded(problem: Any) -> str:
    """Return the message of one of pydantic's problems in the words of a person."""
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown field"
    if problem["type"] == "literal_error":
        return f"only {problem['ctx']['expected'].replace('False', 'false')} is supported"
    return str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")

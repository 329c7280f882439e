"""Command options generated from models (`draftstore.options`).

@click.command(cls=SpreadCommand)
@takes(options=RestOptions)
def rest(options: RestOptions) -> None: ...
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import click
from pydantic import ByteSize, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftstore.options import BYTES, LENGTH, Bytes, Duration, Options, OptionsError, Shown, worded


class Written(click.ParamType[Any]):
    """A value with its own notation, such as `100MB` or `7d`; see `draftstore.options`."""

    def __init__(self, name: str, adapter: TypeAdapter[Any]) -> None:
        self.name = name
        self._adapter = adapter

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            message = worded(error.errors()[0])
            self.fail(f"{value!r}: {message}", param, ctx)


SIZE = Written("size", BYTES)
DURATION = Written("duration", LENGTH)


class ExpertOption(click.Option):
    """An option that only few users need."""


class Command(click.Command):
    """A command whose help lists expert options last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        for title, expert in (("Options", False), ("Expert options", True)):
            found = [each for each in options if isinstance(each, ExpertOption) == expert]
            if records := [record for each in found if (record := each.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(click.Group):
    """A group whose help lists commands under titles, untitled ones last, with their full summaries."""

    command_class = Command
    titles: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = {name: command.get_short_help_str(sys.maxsize) for name, command in found.items() if command}
        others = sorted(rows.keys() - set(chain(*self.titles.values())))
        width = max(map(len, rows))
        for title, names in {**self.titles, "Commands": others}.items():
            if listed := [(name.ljust(width), rows[name]) for name in names if name in rows]:
                with formatter.section(title):
                    formatter.write_dl(listed)


class SpreadCommand(Command):
    """A command whose repeatable options also take several values at once: `--corpus a b c`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite `--corpus a b` to `--corpus a --corpus b` before parsing."""
        many = {name for each in self.params if each.multiple for name in each.opts}
        rewritten: list[str] = []
        option: str | None = None
        fresh = False
        for position, argument in enumerate(args):
            if argument == "--":
                rewritten += args[position:]
                break
            if argument.startswith("-"):
                name, attached, _ = argument.partition("=")
                option = name if name in many else None
                fresh = not attached
            elif option and not fresh:
                rewritten.append(option)
            else:
                fresh = False
            rewritten.append(argument)
        return super().parse_args(ctx, rewritten)


def takes(**models: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of models to a command, which receives one instance of each model under the name given here."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def gathered(**values: Any) -> None:
            made = {name: _instance(model, values) for name, model in models.items()}
            fields = {field for model in models.values() for field in model.model_fields}
            command(**{name: value for name, value in values.items() if name not in fields}, **made)

        for model in reversed(models.values()):
            for name, field in reversed(_in_order(model)):
                if not Shown.of(field).hidden:
                    gathered = click.option(*_flags(name, field), **_settings(field))(gathered)
        return gathered

    return decorate


def _in_order(model: type[Options]) -> list[tuple[str, FieldInfo]]:
    """Return the fields in the order of help: required ones, then those of the model, then those of its bases."""
    own = model.__annotations__
    return sorted(
        model.model_fields.items(), key=lambda each: (not each[1].is_required(), each[0] not in own)
    )


def _instance(model: type[Options], values: dict[str, Any]) -> Options:
    """Return a model of the values given to a command; missing options have their defaults."""
    given = {name: values[name] for name in model.model_fields if values.get(name) not in (None, ())}
    try:
        return model(**given)
    except OptionsError as error:
        flags = {name: _flags(name, field)[0] for name, field in model.model_fields.items()}
        raise click.UsageError(f"{error.spelled(lambda place: flags[place.partition('.')[0]])}.") from None


def _flags(name: str, field: FieldInfo) -> tuple[str, ...]:
    option = name.replace("_", "-")
    switch = bool in _types(field) and field.default is not False
    return (*(Shown.of(field).flags or [f"--{option}/--no-{option}" if switch else f"--{option}"]), name)


def _types(field: FieldInfo) -> list[Any]:
    """Return the types of a value except None; for a tuple, those of its items."""
    of = field.annotation
    types = get_args(of) if get_origin(of) in (Union, UnionType) else (of,)
    found = [each for each in types if each is not NoneType]
    return [get_args(each)[0] if get_origin(each) in (tuple, list) else each for each in found]


def _settings(field: FieldInfo) -> dict[str, Any]:
    shown, types, default = Shown.of(field), _types(field), field.get_default(call_default_factory=True)
    required, of = default is PydanticUndefined, field.annotation
    plain = not (required or shown.unset or default in (None, False, (), ""))
    settings: dict[str, Any] = {
        "help": (field.description or "") + (f" [default: {shown.unset}]" if shown.unset else ""),
        "required": required,
        "metavar": shown.metavar,
        "envvar": shown.variable,
        "show_envvar": shown.variable is not None,
        "cls": ExpertOption if shown.expert else click.Option,
    }
    if any(get_origin(each) in (tuple, list) for each in (of, *get_args(of))):
        return settings | {"multiple": True, "type": _type(field, shown, types)}
    if shown.alone is not None:
        settings |= {"is_flag": False, "flag_value": shown.alone}
    if not required:
        settings["default"] = None if shown.unset else default
    if bool in types:
        is_flag = default is False and not any("/" in flag for flag in shown.flags)
        return settings | ({"is_flag": True} if is_flag else {"show_default": plain or default is False})
    return settings | {"type": _type(field, shown, types), "show_default": plain}


def _type(field: FieldInfo, shown: Shown, types: list[Any]) -> Any:
    first = types[0]
    if shown.choices or get_origin(first) is Literal:
        return click.Choice(shown.choices or get_args(first))
    if Bytes in types or ByteSize in types:
        return SIZE
    if Duration in types:
        return DURATION
    if first is Path:
        return click.Path(path_type=Path)
    if first not in (int, float):
        return str  # parsed by the model
    least, most = _bound(field, "ge", "gt"), _bound(field, "le", "lt")
    if least is None and most is None:
        return first
    opened = {"min_open": _bound(field, "gt") is not None, "max_open": _bound(field, "lt") is not None}
    return (click.IntRange if first is int else click.FloatRange)(least, most, **opened)


def _bound(field: FieldInfo, *names: str) -> Any:
    found = (getattr(each, name, None) for each in field.metadata for name in names)
    return next((bound for bound in found if bound is not None), None)

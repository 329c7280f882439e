"""Settings of a drafter inside an engine, from the environment and a TOML file.

    # draftstore.toml, named by DRAFTSTORE_ENGINE_CONFIG
    stores = ["stores/chat"]          # relative to this file
    request = true
    live = "team=live/team"           # store answers, see `--live` of the worker
    budget = 16

    [corpora.acme]                    # for requests that name it
    release = "chat-acme"
    lookup = "draft-host:7781"

Every key outside `[corpora]` may also be a variable, which overrides the file: DRAFTSTORE_STORES (separated by colons),
DRAFTSTORE_LOOKUP, DRAFTSTORE_RELEASE, DRAFTSTORE_TOKEN, DRAFTSTORE_REQUEST, DRAFTSTORE_BUDGET, ...
"""

import dataclasses
import difflib
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstore.assembly import Sources
from draftstore.errors import DraftstoreError, EngineError, TokenizerError, type_name
from draftstore.live.target import LiveTarget
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.text.tokenizer import load_tokenizer
from draftstore.trees.frontier import MAX_BUDGET

LOG = logging.getLogger(__name__)
CONFIG_VARIABLE = "DRAFTSTORE_ENGINE_CONFIG"
PREFIX = "DRAFTSTORE_"
UNREAD = TokenizerIdentity("not read", "0" * 64)
"""Placeholder for the tokenizer if no source needs one."""
_TEXT, _NUMBER = (str,), (int, float)
_SOURCES: dict[str, tuple[type, ...]] = {
    "stores": (list,), "strategy": _TEXT, "backend": _TEXT, "lookup": _TEXT, "release": _TEXT, "token": _TEXT,
    "deadline": _NUMBER, "request": (bool,), "live": _TEXT, "threads": (int,),
}  # fmt: skip
_OTHERS: dict[str, tuple[type, ...]] = {
    "budget": (int,), "min_prob": _NUMBER, "tokenizer": _TEXT, "metrics": (int, str),
}  # fmt: skip
_KNOWN = {**_SOURCES, **_OTHERS}
_WORDS: dict[tuple[type, ...], str] = {
    (list,): "a list", _TEXT: "text in quotes", _NUMBER: "a number", (bool,): "true or false", (int,): "a whole number",
    (int, str): "a whole number or text in quotes",
}  # fmt: skip
"""Expected types of settings, in words for users."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of a drafter inside an engine.

    Attributes:
        sources: sources of drafts for requests that name no corpus.
        corpora: sources for requests that name one.
        budget: maximum nodes of a draft; an engine's own limit also applies.
        min_prob: minimum probability of a drafted token.
        tokenizer: folder or hub name of the model's tokenizer; None: that of the engine.
        metrics: `HOST:PORT`, or a port of this machine, at which metrics are served; None: not served.
    """

    sources: Sources = dataclasses.field(default_factory=Sources)
    corpora: Mapping[str, Sources] = dataclasses.field(default_factory=dict)
    budget: int = 16
    min_prob: float = 0.0
    tokenizer: str | None = None
    metrics: str | int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 1 <= self.budget <= MAX_BUDGET:
            raise EngineError(f"a budget of {self.budget} nodes: expected 1 to {MAX_BUDGET:,}")
        if not 0.0 <= self.min_prob <= 1.0:
            raise EngineError(f"a minimum probability of {self.min_prob}: expected 0 to 1")

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> "EngineConfig":
        """Read the settings.

        Args:
            environment: variables; None: those of this process.

        Raises:
            EngineError: the file cannot be read, or a setting is unknown, of the wrong type or out of range.
        """
        given = os.environ if environment is None else environment
        path = given.get(CONFIG_VARIABLE)
        found, folder = ({}, Path()) if not path else (_read_toml(Path(path)), Path(path).parent)
        corpora = found.pop("corpora", {})
        if not isinstance(corpora, dict):
            raise EngineError(
                f"{path}: expected corpora as tables [corpora.NAME], found {type_name(corpora)}"
            )
        if "" in corpora:
            raise EngineError(
                f"{path}: [corpora] has a corpus with an empty name, which no request can refer to"
            )
        where = path or "the environment"
        _warn_of_slips(given)
        for name in _KNOWN:
            if text := given.get(PREFIX + name.upper()):  # an empty one counts as unset
                found[name] = _parse(name, text)
        _check(found, _KNOWN, where)
        sources = {name: found.pop(name) for name in _SOURCES if name in found}
        named = {
            name: _corpus(table, f"{where}, [corpora.{name}]", folder) for name, table in corpora.items()
        }
        return cls(sources=_sources(sources, where, folder), corpora=named, **found)


def _warn_of_slips(given: Mapping[str, str]) -> None:
    """Warn about variables that look like misspelt settings."""
    known = [PREFIX + name.upper() for name in _KNOWN]
    for name in given:
        if name.startswith(PREFIX) and name not in known:
            for meant in difflib.get_close_matches(name, known, 1, 0.9):
                LOG.warning("unknown setting %s: did you mean %s?", name, meant)


def _read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"no settings at {path} ({error.strerror}): check {CONFIG_VARIABLE}") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path} is not TOML: {error}") from None


def _parse(name: str, text: str) -> Any:
    """Return the value of a variable as it would appear in the file."""
    kinds = _KNOWN[name]
    if list in kinds:
        return [str(Path(part).absolute()) for part in text.split(os.pathsep) if part]
    try:
        if bool in kinds:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if float in kinds:
            return float(text)
        if int in kinds and (str not in kinds or text.isdecimal()):
            return int(text)
    except (KeyError, ValueError):
        raise EngineError(f"{PREFIX}{name.upper()}={text!r}: expected {_WORDS[kinds]}") from None
    return text


def _check(found: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Raise an EngineError for settings that are unknown or of the wrong type."""
    for name, value in found.items():
        if name not in known:
            raise EngineError(f"{where}: unknown setting {name!r}; known settings are {', '.join(known)}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and bool not in known[name]):
            raise EngineError(f"{where}: {name} is {value!r}, expected {_WORDS[known[name]]}")
    wrong = [part for part in found.get("stores", ()) if not isinstance(part, str)]
    if wrong:
        raise EngineError(f"{where}: stores contains {wrong[0]!r}, expected folders as text")


def _corpus(table: Any, where: str, folder: Path) -> Sources:
    """Return the sources of a corpus."""
    if not isinstance(table, dict):
        raise EngineError(f"{where}: expected a table, found {type_name(table)}")
    _check(table, _SOURCES, where)
    return _sources(dict(table), where, folder)


def _sources(found: dict[str, Any], where: str, folder: Path) -> Sources:
    stores = tuple(folder / part for part in found.pop("stores", ()))
    try:
        if "live" in found:
            found["live"] = LiveTarget.parse(found["live"], folder)
        return Sources(stores=stores, **found)
    except DraftstoreError as error:
        raise EngineError(f"{where}: {error}") from None


def tokenizer_identity(config: EngineConfig, own: str) -> TokenizerIdentity:
    """Return the identity of the model's tokenizer."""
    sources = (config.sources, *config.corpora.values())
    asked = any(each.stores or each.lookup or each.release or each.live for each in sources)
    if config.tokenizer is None and not asked:
        return UNREAD
    try:
        return load_tokenizer(config.tokenizer or own).identity
    except TokenizerError as error:
        raise EngineError(f"{error}; or set DRAFTSTORE_TOKENIZER to the model's tokenizer") from None

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

import difflib
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from draftstore.assembly.sources import Sources
from draftstore.errors import DraftstoreError, EngineError, TokenizerError
from draftstore.options import Number
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.text.tokenizer import load_tokenizer
from draftstore.trees.frontier import MAX_BUDGET

LOG = logging.getLogger(__name__)
CONFIG_VARIABLE = "DRAFTSTORE_ENGINE_CONFIG"
PREFIX = "DRAFTSTORE_"
UNREAD = TokenizerIdentity("not read", "0" * 64)
"""Placeholder for the tokenizer if no source needs one."""


class EngineConfig(Sources):
    """Settings of a drafter inside an engine; its own sources are for requests that name no corpus."""

    corpora: Mapping[Annotated[str, Field(min_length=1)], Sources] = Field(
        {}, description="Sources for requests that name a corpus."
    )
    budget: Annotated[int, Number] = Field(
        16,
        ge=0,
        le=MAX_BUDGET,
        description="Maximum nodes of a draft; an engine's own limit also applies. 0: no drafts.",
    )
    adaptive: bool = Field(
        True,
        description="Verify as many nodes as pay at the engine's load, whose cost is measured while it runs. False: "
        "always whole drafts.",
    )
    min_prob: Annotated[float, Number] = Field(
        0.0, ge=0, le=1, description="Minimum probability of a drafted token."
    )
    tokenizer: str | None = Field(
        None, description="Folder or hub name of the model's tokenizer. None: that of the engine."
    )
    metrics: str | None = Field(
        None,
        coerce_numbers_to_str=True,
        description="HOST:PORT, or a port of this machine, at which metrics are served. None: not served.",
    )

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read the settings.

        Args:
            environment: variables; None: those of this process.

        Raises:
            EngineError: the file cannot be read, or a setting is unknown, of the wrong type or out of range.
        """
        given = os.environ if environment is None else environment
        path = given.get(CONFIG_VARIABLE)
        variables = {PREFIX + name.upper(): name for name in cls.model_fields if name != "corpora"}
        _warn_of_slips(given, variables)
        found: dict[str, Any] = {name: given[each] for each, name in variables.items() if given.get(each)}
        if "stores" in found:
            found["stores"] = [part for part in found["stores"].split(os.pathsep) if part]
        config = cls() if not path else cls._from_file(Path(path))
        try:
            return config.changed(**found)
        except DraftstoreError as error:
            raise EngineError(error.spelled(lambda name: PREFIX + name.upper())) from None

    @classmethod
    def _from_file(cls, path: Path) -> Self:
        """Return the settings of a TOML file, relative to its folder."""
        try:
            config = cls(**tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise EngineError(f"no settings at {path} ({error.strerror}): check {CONFIG_VARIABLE}") from None
        except DraftstoreError as error:
            raise EngineError(f"{path}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{path} is not TOML: {error}") from None
        corpora = {name: each.beside(path.parent) for name, each in config.corpora.items()}
        return config.beside(path.parent).changed(corpora=corpora)


def _warn_of_slips(given: Mapping[str, str], known: Mapping[str, str]) -> None:
    for name in given:
        if name.startswith(PREFIX) and name not in known:
            for meant in difflib.get_close_matches(name, known, 1, 0.9):
                LOG.warning("unknown setting %s: did you mean %s?", name, meant)


def tokenizer_identity(config: EngineConfig, own: str) -> TokenizerIdentity:
    """Return the identity of the model's tokenizer."""
    sources = (config, *config.corpora.values())
    asked = any(each.stores or each.lookup or each.release or each.live for each in sources)
    if config.tokenizer is None and not asked:
        return UNREAD
    try:
        return load_tokenizer(config.tokenizer or own).identity
    except TokenizerError as error:
        raise EngineError(f"{error}; or set DRAFTSTORE_TOKENIZER to the model's tokenizer") from None

"""The sources of drafts that a user names: options of commands, of the worker and of engines."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from draftstore.jit import CORES
from draftstore.live.directory import ANSWERS
from draftstore.live.store import LiveTarget
from draftstore.options import Number, Options, Shown, parsed
from draftstore.remote.client import DEADLINE
from draftstore.stores.crest.entries import Backend
from draftstore.stores.registry import KINDS, kind_of, strategies_of

TOKEN_VARIABLE = "DRAFTSTORE_TOKEN"  # noqa: S105 (the name of a variable)


def _known_strategies() -> str:
    titles: dict[tuple[str, ...], list[str]] = {}
    for kind in map(kind_of, KINDS):
        titles.setdefault(kind.strategies, []).append(kind.title)
    return "; ".join(
        f"{' and '.join(kinds)} {'support' if len(kinds) > 1 else 'supports'} {', '.join(strategies)}"
        for strategies, kinds in titles.items()
        if strategies
    )


Strategy = Annotated[
    str | None,
    Shown(choices=tuple(sorted(strategies_of(KINDS))), unset="each store's own", expert=True),
    Field(
        description="How stores draft; a store that does not support the strategy uses its default. "
        f"{_known_strategies()}.",
        examples=["longest"],
    ),
]
"""The strategy option of commands that draft."""


class Sources(Options):
    """The sources of drafts.

    Attributes:
        threads: maximum threads for drafts of several texts from a REST store.
    """

    stores: Annotated[tuple[Path, ...], Shown(flags=("--store",), metavar="DIR")] = Field(
        (),
        description="Draft from this store; Token Recycling starts from a store of kind recycling. Stores of kind "
        "dresd and recycling must belong to this model. May be repeated.",
        examples=[["stores/chat", "stores/code"]],
    )
    strategy: Strategy = None
    backend: Backend = None
    lookup: Annotated[str | None, Shown(metavar="ADDRESS", unset="this user's own, with --release")] = Field(
        None,
        description="Draft from a lookup service: unix:/path, host:port or tls://host:port.",
        examples=["unix:/run/draftstore/lookup.sock", "tls://drafts:7781"],
    )
    release: Annotated[str | None, Shown(metavar="NAME")] = Field(
        None, description="Release or store to ask the lookup service for.", examples=["chat-vicuna"]
    )
    token: Annotated[
        str | None, Shown(flags=("--lookup-token",), metavar="TOKEN", variable=TOKEN_VARIABLE)
    ] = Field(
        None,
        description="Bearer token, if the service requires one; the variable keeps it out of process lists.",
    )
    deadline: Annotated[
        float | None,
        Number,
        Shown(
            flags=("--lookup-deadline",),
            metavar="SECONDS",
            unset=f"{DEADLINE}; in a worker whose model was measured by `tune`, a tenth of a pass if that is longer",
            expert=True,
        ),
    ] = Field(
        None,
        gt=0,
        le=60,
        description="Maximum seconds that a step waits for the lookup service; networks need more.",
        examples=[0.01],
    )
    live: Annotated[
        LiveTarget | None, parsed(LiveTarget.parse), Shown(metavar="NAME[=DIR][:TOKENS]", unset="nothing")
    ] = Field(
        None,
        description="Remember finished answers, at most TOKENS of them (a million), and draft from them: with --lookup "
        "or --release in the live store NAME of the service, shared by all clients of that name; with DIR, or without "
        "a service, in this process. See docs/security.md.",
        examples=["team", "team=live/team:200000"],
    )
    recall: Annotated[int, Number, Shown(metavar="N")] = Field(
        0,
        ge=0,
        le=ANSWERS,
        description="Also draft from the N latest answers of the live store to the same prompt, as when a model in "
        "training answers it again. See docs/rollouts.md.",
        examples=[16],
    )
    request: bool = Field(True, description="Draft from the prompt and the output so far.")
    recycling: Annotated[bool, Shown(flags=("--recycling/--no-recycling",))] = Field(
        False, description="Draft from the model's last candidates."
    )
    threads: Annotated[int, Number, Shown(hidden=True)] = Field(min(4, CORES), ge=1)

    def beside(self, folder: Path) -> Self:
        """Return the same sources with relative paths in a folder."""
        live = self.live and self.live._replace(folder=self.live.folder and folder / self.live.folder)
        return self.changed(stores=tuple(folder / path for path in self.stores), live=live)

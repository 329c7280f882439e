"""The interface of a kind of store: what its stores are built from, how they are opened, verified and warmed up.

Each kind has an object `STORE_KIND` in a module that `draftstore.stores.registry` lists. Commands and services use
these objects and do not depend on particular kinds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from draftstore.cluster import VARIABLE
from draftstore.drafting.contexts import ContextDrafter
from draftstore.errors import DraftstoreError, StoreError
from draftstore.options import Options, Shown
from draftstore.storage.manifest import Manifest
from draftstore.storage.staging import BuildResult

CONTEXT_TOKENS = 16
"""Tokens of a sample context; no drafter uses more."""
T = TypeVar("T")
TOKENIZER = "A folder with tokenizer.json, that file, or a name on the Hugging Face hub."
TOKENIZERS = ["/models/llama-2", "lmsys/vicuna-7b-v1.5"]


class Samples(NamedTuple):
    """Contexts with matches in a store, int32 [n, 16], padded with -1 on the left, for drafts before the first request.

    `hidden` are states for dense stores, float16 [n, hidden_size].
    """

    contexts: NDArray[np.int32]
    hidden: NDArray[np.float16] | None = None


class Store(Protocol):
    """An open store."""

    path: Path
    manifest: Manifest
    strategies: tuple[str, ...]
    default_strategy: str

    def drafter(self, strategy: str = ..., **changes: Any) -> ContextDrafter:
        """Return a drafter with a strategy."""

    def samples(self, number: int) -> Samples:
        """Return at most `number` contexts from all parts of the store."""

    def close(self) -> None:
        """Close its files and connections."""


class Builder(NamedTuple):
    """How a kind of store is built: the command `draftstore build KIND` and the flow `build-KIND` derive from it.

    Attributes:
        options: what determines the bytes of a store besides its sources, and the store's `name`.
        sources: `TextSources`, `ModelSources`, or `RestSources` of `draftstore.stores.rest.build`.
        build: called with options and the keywords `out`, `overwrite`, `progress`, and those of
            `draftstore.hf.building.materials`.
        help: help of the command.
        counted: whether the flow also counts the n-grams of the REST store, for SQL.
    """

    options: type[Options]
    sources: type[Options]
    build: Callable[..., BuildResult]
    help: str
    counted: bool = False


class Kind:
    """A kind of store, called `name` in manifests. The defaults here suffice for kinds without drafts.

    Attributes:
        title: display name.
        strategies: strategies of its drafters; none if `open_store` cannot open such stores.
        needs_states: whether drafts need hidden states of a model besides the text.
        builder: module whose `BUILDER` builds such stores; "": they have no build command and no build flow.
    """

    title = ""
    strategies: tuple[str, ...] = ()
    needs_states = False
    builder = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, path: Path, backend: str | None = None) -> Store:
        """Open a store; `backend` is that of its entries, for kinds that have several. StoreError if it cannot."""
        if backend is not None:
            raise StoreError(
                f"{path} is a store of kind {self.name!r}, which has no backends: omit it", "backend"
            )
        return self.open_files(path)

    def open_files(self, path: Path) -> Store:
        """Open a store of a kind without backends."""
        raise StoreError(f"{path} is a store of kind {self.name!r}, which gives no drafts")

    def backend(self, manifest: Manifest, wanted: str | None) -> str | None:  # noqa: ARG002
        """Return the backend of a store's entries: `wanted`, by default the first; None for kinds without backends."""
        return None

    def verify_entries(self, path: Path, manifest: Manifest) -> list[str]:  # noqa: ARG002
        """Compare data outside a store's directory with the recorded hashes; return a sentence for each problem."""
        return []

    def info(self, manifest: Manifest) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        """Yield the rows, label and text, that `draftstore info` shows only for this kind."""
        yield from ()

    def figures(self, manifest: Manifest) -> dict[str, Any]:  # noqa: ARG002
        """Return quality figures of a store by name, for the report of its flow run."""
        return {}

    def load_kernels(self) -> None:
        """Compile this kind's drafting kernels, or load them from numba's cache."""


def strategy_named(name: str, strategies: Mapping[str, T]) -> T:
    """Return the strategy with a name; if there is none, raise a DraftstoreError that lists them."""
    if name not in strategies:
        raise DraftstoreError(f"unknown strategy {name!r}: expected one of {', '.join(sorted(strategies))}")
    return strategies[name]


def sample_contexts(rows: Sequence[NDArray[Any]], vocab_size: int) -> NDArray[np.int32]:
    """Return tokens [at most 16] from several places of a store as contexts, int32 [n, 16]; -1 for invalid ids."""
    contexts = np.full((len(rows), CONTEXT_TOKENS), -1, np.int32)
    for context, row in zip(contexts, rows, strict=True):
        context[CONTEXT_TOKENS - len(row) :] = np.where(row < vocab_size, row, -1)
    return contexts


class Workers(Options):
    """How much of this machine a build uses."""

    workers: Annotated[int | None, Shown(unset="all cores")] = Field(
        None, ge=1, le=1024, description="Number of sorting processes and of threads.", examples=[4]
    )


class Spreading(Workers):
    """Where the independent parts of a build run."""

    cluster: Annotated[
        str | None, Shown(metavar="HOST:PORT", unset="this machine alone", variable=VARIABLE)
    ] = Field(
        None,
        min_length=1,
        description="Tokenize and sort on a Ray cluster: the address of its head. This machine is one of its nodes, "
        "and all of them see the corpus and the store under the same paths.",
        examples=["10.0.0.1:6379"],
    )


class TextSources(Spreading):
    """Sources of a store built from the corpus that the options name (`CorpusOptions`)."""

    tokenizer: Annotated[str, Shown(metavar="T")] = Field(
        min_length=1, description=TOKENIZER, examples=TOKENIZERS
    )


Weights = Annotated[
    Literal["auto", "float32", "float64", "bfloat16", "float16"] | None, Shown(unset="auto; on CPUs float32")
]
"""Data type of a model's weights."""


class Device(Options):
    """Where a model runs."""

    device: Annotated[str | None, Shown(unset="the GPU, if there is one", metavar="D")] = Field(
        None, min_length=1, description="Device: cpu, cuda, cuda:1, ...", examples=["cpu", "cuda", "cuda:1"]
    )


class ModelChoice(Device):
    """A model and where it runs."""

    model: Annotated[str, Shown(metavar="M")] = Field(
        min_length=1,
        description="Model: a directory, a hub name organisation/model, or a GGUF file.",
        examples=["/models/SmolLM2-135M-Instruct", "org/model"],
    )


class ModelSources(ModelChoice):
    """Sources of a store built from the corpus that the options name and a model that reads it."""

    model_dtype: Weights = Field(None, description="Data type of the weights.")
    batch_tokens: Annotated[int | None, Shown(unset="2,048 on CPUs, 16,384 on GPUs", expert=True)] = Field(
        None, ge=1, description="Number of tokens per model batch; fewer take less memory.", examples=[16_384]
    )

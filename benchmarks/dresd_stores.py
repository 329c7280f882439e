"""The stores of the DReSD benchmark: REST, CREST and DReSD of the same texts; the model reads each text once."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Workspace
from benchmarks.measure import progress
from draftstore.drafting.projection import Projection
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.dresd.build import DresdOptions, DresdProgress, build_dresd
from draftstore.stores.dresd.embedding import StateSource
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import TextTokenizer


class KeptStates:
    """A `StateSource` that keeps every state in memory: stores of other dimensions need no second run of the model.

    Attributes:
        seconds: that the model took.
        tokens: that it read.
    """

    def __init__(self, source: StateSource) -> None:
        """Keep what `source` computes."""
        self.name, self.vocab_size = source.name, source.vocab_size
        self.hidden_size, self.positions = source.hidden_size, source.positions
        self.seconds = 0.0
        self.tokens = 0
        self._source = source
        self._kept: dict[bytes, NDArray[np.float16]] = {}

    def identity(self) -> dict[str, str]:
        """Return what decides the states; see `StateSource`."""
        return self._source.identity()

    def states(
        self, texts: Sequence[NDArray[Any]], projection: Projection | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield index and states of each text; see `StateSource`."""
        keys = [hashlib.sha256(text.tobytes()).digest() for text in texts]
        unknown = [index for index, key in enumerate(keys) if key not in self._kept]
        begin = perf_counter()
        for place, states in self._source.states([texts[index] for index in unknown]):
            self._kept[keys[unknown[place]]] = states.astype(np.float16)
            self.tokens += len(states)
        self.seconds += perf_counter() - begin
        for index, key in enumerate(keys):
            states = self._kept[key].astype(np.float32)
            yield index, states if projection is None else projection.apply(states)


@dataclasses.dataclass
class Stores:
    """The stores of one corpus.

    Attributes:
        rest: token sequences.
        crest: precomputed trees.
        dense: by dimensions.
        build: seconds and tokens of the build with 64 dimensions, where it was made in this run.
    """

    rest: RestStore
    crest: CrestStore
    dense: dict[int, DresdStore]
    build: dict[str, Any]


def make_stores(
    space: Workspace,
    tokenizer: TextTokenizer,
    source: StateSource,
    corpus: Path,
    ngrams: int,
    dims: Sequence[int],
) -> Stores:
    """Open the stores of a corpus; they are built if they are not there yet."""
    folder = space.work / "stores"
    name = corpus.stem
    progress(f"stores of {name}")
    rest = folder / f"{name}-rest"
    crest = folder / f"{name}-crest-{ngrams}"
    build_rest(RestOptions(corpus=(corpus,), name=name), tokenizer, rest)
    build_crest(CrestOptions(name=f"{name}-crest", ngrams=ngrams), rest, crest)
    kept = KeptStates(source)
    dense, build = {}, {}
    for size in sorted(
        dims, key=lambda size: size != 64
    ):  # the one that is reported first: it runs the model
        path = folder / f"{name}-dresd-{size}"
        begin = perf_counter()
        options = DresdOptions(corpus=(corpus,), name=path.name, dims=size)
        result = build_dresd(options, tokenizer, kept, path, progress=DresdProgress(sampled=_say))
        if size == 64 and not result.reused:
            build = {
                "seconds": round(perf_counter() - begin, 1),
                "model_seconds": round(kept.seconds, 1),
                "tokens": kept.tokens,
                "tokens_per_second": round(kept.tokens / kept.seconds),
            }
        dense[size] = DresdStore.open(path, target_model=source.name, tokenizer=tokenizer.identity)
    return Stores(RestStore.open(rest), CrestStore.open(crest), dense, build)


def _say(done: int, total: int) -> None:
    """Say how far the model has read."""
    progress(f"read {done:,} of {total:,} tokens")

"""Drafts from texts are the same bytes on every machine: with the host's instructions and with plainer ones."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.jit import kernel
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.search.expand import power_of
from draftstore.stores.registry import open_store
from draftstore.trees.tree import LEVEL_BOUNDS, DraftTree

PLAIN = {
    "NUMBA_CPU_NAME": "generic",
    "NUMBA_CPU_FEATURES": "",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA",  # other variants of pow and exp2
}
"""What makes a process of any x86-64 processor draw with the instructions that all of them have."""


@pytest.mark.slow
def test_every_processor_drafts_the_same_bytes(small_store: Path, small_crest: Path) -> None:
    here, plain = (
        subprocess.run(
            [sys.executable, "-m", "tests.unit.test_processors", small_store, small_crest],
            env=os.environ | settings,
            check=True,
            timeout=600,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        for settings in ({}, PLAIN)
    )
    assert len(here) > 1_000
    assert sum(len(line) > 40 for line in here) > 500, "most trees have nodes"
    different = [line.split(" ")[0] for line, other in zip(here, plain, strict=True) if line != other]
    assert not different


@kernel
def powers(bases: Any, exponent: Any) -> Any:
    """Return what the back-off rule takes for the powers of some numbers."""
    found = np.empty(len(bases))
    for i in range(len(bases)):
        found[i] = power_of(bases[i], exponent)
    return found


def drawn(stores: Sequence[Path]) -> Iterator[tuple[str, DraftTree | NDArray[Any]]]:
    """Yield the trees of every kind of drafter, and numbers that levels hang on, which seldom tell in a tree."""
    yield "level bounds", LEVEL_BOUNDS
    yield "powers", powers(np.arange(7, 100_000) / 7, 0.7)
    rest, crest = (cast("Any", open_store(path)) for path in stores)
    vocab_size = rest.manifest.vocab_size
    rng = np.random.default_rng(0)
    text = rest.index.tokens[:400].astype(np.int32)
    text = text[text < vocab_size]
    static = {
        "longest": rest.drafter("longest"),
        "backoff": rest.drafter("backoff"),
        "sampled": rest.drafter("backoff", rows=7, gamma=0.7),
        "crest": crest.drafter("backoff"),
    }
    for name, drafter in static.items():
        for draft in drafter.draft(np.lib.stride_tricks.sliding_window_view(text, 16)[:100], 64):
            yield name, draft.tree
    recycling, request = RecyclingDrafter(vocab_size), RequestDrafter(vocab_size)
    mixture = Mixture([static["sampled"], static["crest"], request, RecyclingDrafter(vocab_size)])
    for name, learner in {"request": request, "recycling": recycling, "mixture": mixture}.items():
        session = cast("Drafter", learner).session(text[:2])
        for token in text[2:302].tolist():
            tree = session.propose(64)
            yield name, tree
            candidates = rng.integers(0, vocab_size, (len(tree) + 1, 8), np.int32)
            session.observe([token], tree=tree, candidates=candidates)


if __name__ == "__main__":
    for name, found in drawn([Path(path) for path in sys.argv[1:]]):
        print(name, (found.to_bytes() if isinstance(found, DraftTree) else found.tobytes()).hex())

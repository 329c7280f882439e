"""Warming: files are in memory, drafts are made, and nothing unnecessary is read."""

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from draftstore.jit import read_only
from draftstore.search.expand import draft_batch
from draftstore.stores.dresd.kernels.dense_tree import draft_trees
from draftstore.stores.registry import KINDS, open_store
from services.lookup import served
from services.lookup.served import load_kernels
from tests.fakes.dense_stores import make_dense_store


def test_the_first_start_logs_compilation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.perf_counter", itertools.count(step=2).__next__)
    with caplog.at_level("INFO", served.LOG.name):
        load_kernels()
    first, *steps = caplog.records
    assert "the first start after an install compiles them" in first.message
    assert [name for step in steps for name in KINDS if f" {name} " in step.message] == list(KINDS)


@pytest.mark.parametrize("name", ["small_store", "small_crest", "wide_store", "small_dense", "wide_dense"])
def test_warming_loads_every_kernel(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name == "wide_dense":
        path = make_dense_store(tmp_path / name, [[1, 2, 3]], vocab_size=70_000)
    else:
        path = request.getfixturevalue(name)
    load_kernels()
    kernels = draft_batch, draft_trees
    known = [len(kernel.signatures) for kernel in kernels]
    with closing(open_store(path)) as store:
        for count in (1, 3):
            contexts, hidden = store.samples(count)
            for make in (np.copy, read_only):  # those of a frame cannot be written
                states = None if hidden is None else make(hidden)
                store.drafter().draft_batch(make(contexts), hidden=states).encode_trees()
    assert [len(kernel.signatures) for kernel in kernels] == known

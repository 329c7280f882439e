"""What the doubles of SGLang say, compared with SGLang where it is installed; no GPU is needed.

In an environment of its own: `pip install torch==2.13.0`, then `pip install --no-deps sglang==0.5.23 triton` and what
its imports ask for. Its kernels (`sgl_kernel`) are stood in for: nothing here runs them.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.engines.config import EngineConfig
from draftstore.engines.masks import rows_and_mask
from draftstore.engines.proposer import Proposer
from draftstore.engines.sglang import TRIE_NODES, BatchDrafts, StoreDrafts, register
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of
from tests.fakes.sglang_engine import VERSION, Accepted, Batch, Request, links_of

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module `sgl_kernel` that has every name, none of which does anything."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.split(".")[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _nothing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Add nothing."""


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """Return SGLang's module of the worker, or skip."""
    finder = Kernels()
    sys.meta_path.append(finder)
    try:
        import sglang.srt.speculative.ngram_worker as module
    except ImportError as error:
        pytest.skip(f"sglang cannot be imported: {error}")
    else:
        yield module
    finally:
        sys.meta_path.remove(finder)


def test_the_doubles_are_those_of_this_version() -> None:
    assert version("sglang") == VERSION


paths = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)
trees = st.dictionaries(paths, st.floats(0.01, 1.0), max_size=12).map(tree_of)


@given(drafts=st.lists(trees, min_size=1, max_size=3), rows=st.integers(1, 16))
def test_it_finds_the_links_of_the_double(worker: Any, drafts: Sequence[DraftTree], rows: int) -> None:
    _, mask = rows_and_mask(drafts, [0] * len(drafts), rows)
    children, siblings = worker._derive_tree_links(mask, len(drafts), rows)
    for place, own in enumerate(mask.reshape(-1, rows, rows)):
        links = links_of(own)
        assert (children[place].tolist(), siblings[place].tolist()) == (links.children, links.siblings)


@pytest.fixture(scope="module")
def algorithm(worker: Any) -> Any:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    register()
    return SpeculativeAlgorithm.from_string("draftstore")


def test_it_is_asked_what_the_ngram_algorithm_is_asked(algorithm: Any, worker: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    for name, method in vars(SpeculativeAlgorithm).items():
        if name.startswith(("is_", "supports_", "has_", "carries_", "need_")) and callable(method):
            assert getattr(algorithm, name)() == getattr(SpeculativeAlgorithm.NGRAM, name)()
    assert algorithm.is_ngram()
    assert callable(algorithm.create_future_map)
    assert algorithm.supports_overlap
    assert algorithm.factory(None).__mro__[1:3] == (StoreDrafts, worker.NGRAMWorker)


def test_its_settings_take_what_we_choose(algorithm: Any) -> None:
    from sglang.srt.arg_groups.overrides import record_foreign_defaults, resolving_view
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="model", device="cpu")
    record_foreign_defaults(args, "test", algorithm.handle_server_args)
    found = resolving_view(args)
    assert (found.speculative_num_draft_tokens, found.speculative_eagle_topk) == (17, 10)
    assert (found.speculative_ngram_capacity, found.max_running_requests) == (TRIE_NODES, 48)
    assert found.disable_overlap_schedule


def test_its_worker_verifies_our_drafts(algorithm: Any) -> None:
    made = algorithm.factory(None).__new__(algorithm.factory(None))
    made.enable_overlap, made.draft_token_num = True, 4
    made._ranks = SimpleNamespace(world_size=1)
    proposer = Proposer(
        EngineConfig(), engine="sglang", vocab_size=50, tokenizer=TokenizerIdentity("nobody", "0" * 64)
    )
    made.ngram_corpus = BatchDrafts(proposer, 4)
    accepted = Accepted(np.array([1, 0, 0, 0], np.int32), np.array([1], np.int32))
    tokens, mask = made._prepare_draft_tokens(Batch([Request("one", [1, 2, 3])], accepted))
    assert tokens.tolist() == [1, 2, 3, 1]
    assert np.array_equal(mask.reshape(4, 4), np.tri(4))
    made.clear_cache_pool()
    assert len(made.ngram_corpus) == 0

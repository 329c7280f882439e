"""Other systems as drafters of `benchmarks.quality`: what they are told, and how their answers become trees."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.asked import Arctic, Ngram, PromptLookup
from benchmarks.host_times import time_in_turn
from benchmarks.systems import System
from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.request import RequestDrafter
from draftstore.engines.masks import rows_and_mask
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of

ids = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def looked_up(text: list[int], budget: int) -> list[int]:
    """Return what prompt lookup drafts, by its definition."""
    for n in range(PromptLookup.longest, 0, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n :][:budget]
    return []


@given(ids, ids, st.integers(1, 8))
def test_prompt_lookup_takes_the_first_longest_match(prompt: list[int], more: list[int], budget: int) -> None:
    session = PromptLookup().session(prompt)
    session.observe(more)
    tree = session.propose(budget)
    assert tree.tokens.tolist() == looked_up(prompt + more, budget)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


def test_a_text_outgrows_its_room() -> None:
    session = PromptLookup().session([1, 2])
    for _ in range(3):
        session.observe(np.arange(3000) + 5)
    assert session.propose(4).tokens.tolist() == [5, 6, 7, 8]


class Cache:
    """Keeps what arctic-inference 0.3.0's SuffixDecodingCache is told, as its own checks demand it."""

    def __init__(self) -> None:
        self.told: dict[str, list[int]] = {}
        self.active: set[str] = set()

    def start_request(self, name: str, prompt: Any) -> None:
        assert name not in self.told
        self.told[name] = prompt.tolist()
        self.active.add(name)

    def add_active_response(self, name: str, ids: Any) -> None:
        assert name in self.active
        self.told[name] += ids.tolist()

    def stop_request(self, name: str) -> None:
        self.active.remove(name)

    def evict_cached_response(self, name: str) -> None:
        assert name not in self.active
        del self.told[name]

    def speculate(self, name: str, context: Any, **options: Any) -> Any:
        assert name in self.active
        assert context.tolist() == self.told[name][-Arctic.depth :]
        best = self.told[name][1 : 1 + options["max_spec_tokens"]]
        return SimpleNamespace(token_ids=best, parents=list(range(-1, len(best) - 1)))


def test_arctic_is_told_the_requests_one_after_the_other() -> None:
    arctic = Arctic(Cache())
    text = np.tile(np.arange(50, dtype=np.int32), 4)
    recordings = [Recording(name, text[:100], text[100:]) for name in ("one", "two")]
    result = replay(arctic, recordings, budget=4)
    assert result.rows == 2
    assert list(arctic.cache.told.values()) == [text.tolist()] * 2
    arctic.forget()
    assert not arctic.cache.told
    assert replay(arctic, recordings, budget=4).tokens == result.tokens


paths = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)


@given(st.dictionaries(paths, st.floats(0.01, 1.0), max_size=9).map(tree_of), st.integers(0, 3))
def test_answers_of_sglang_become_trees_without_padding(tree: DraftTree, padding: int) -> None:
    rows = len(tree) + 1
    tokens, mask = rows_and_mask([tree], [9], rows)
    padded = np.zeros((rows + padding, rows + padding), bool)
    padded[:rows, :rows] = mask.reshape(rows, rows)
    padded[rows:, 0] = True  # SGLang pads with token 0 below the root
    np.fill_diagonal(padded, True)
    session = Ngram(None, rows + padding - 1).session([9])
    got_tokens, got_parents = session.read((np.concatenate([tokens, np.zeros(padding, int)]), padded))
    found = DraftTree(np.array(got_tokens), np.array(got_parents), np.zeros(len(got_tokens), np.uint8))
    expected = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
    extra = {(0,)} if padding else set()
    assert {tuple(found.tokens[found.path(node)].tolist()) for node in range(len(found))} == expected | extra
    assert len(found) == len(expected | extra)


def test_all_systems_are_timed_at_the_same_places() -> None:
    text = np.tile(np.arange(40, dtype=np.int32), 10)
    systems = {"lookup": System(PromptLookup()), "request": System(RequestDrafter(64))}
    times = time_in_turn(systems, [Recording("one", text[:10], text[10:])], nodes=4, drafts=30)
    samples = {name: (taken["draft"]["samples"], taken["learn"]["samples"]) for name, taken in times.items()}
    assert samples == dict.fromkeys(systems, (30, 30))

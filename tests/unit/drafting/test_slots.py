"""Drafts for many texts in one call: the same as each gets alone, with one call per store."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import Slots, start
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import RandomTrees
from tests.unit.drafting.test_drafter import Recorder, ids, store

VOCAB = store("longest").vocab_size


@given(
    texts=st.lists(st.tuples(ids, st.sampled_from([0, 5, 64]), st.sampled_from([0.0, 0.05])), max_size=6),
    kinds=st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_each_gets_what_it_gets_alone(texts: list[tuple[list[int], int, float]], kinds: list[int]) -> None:
    one, other = store("longest"), store("backoff")
    drafters: list[Any] = [
        one,
        other,
        RequestDrafter(VOCAB),
        Mixture([RequestDrafter(VOCAB), one]),
        Mixture([one, other, RecyclingDrafter(VOCAB)]),
    ]
    chosen = [(*drafters, RandomTrees(VOCAB))[kind] for kind, _ in zip(kinds, texts, strict=False)]
    alone = [
        drafter.session(text).propose(budget, min_prob) if budget else DraftTree.empty()
        for drafter, (text, budget, min_prob) in zip(chosen, texts, strict=True)
    ]
    slots = Slots()
    places = [
        start(drafter, text, slots=slots).slot for drafter, (text, _, _) in zip(chosen, texts, strict=True)
    ]
    drafts = slots.propose(places, [budget for _, budget, _ in texts], [least for _, _, least in texts])
    assert drafts.trees() == alone


@pytest.mark.parametrize("mixed", [False, True])
def test_a_store_is_asked_once(mixed: bool) -> None:
    recorder = Recorder()
    drafter: Any = Mixture([RequestDrafter(VOCAB), recorder]) if mixed else recorder
    slots = Slots()
    places = [start(drafter, [number, number + 1], slots=slots).slot for number in range(5)]
    slots.propose(places, [16] * 5, [0.0] * 5)
    slots.propose(places, [16, 0, 16, 8, 16], [0.0] * 5)
    assert [len(contexts) for contexts, _, _ in recorder.calls] == [5, 3, 1]

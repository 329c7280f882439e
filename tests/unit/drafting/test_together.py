"""Drafts for many texts in one call: the same as each session proposes alone, with one call per store."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.contexts import ContextSession
from draftstore.drafting.drafter import Session
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.together import propose_many
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
        RandomTrees(VOCAB),
    ]

    def sessions() -> list[Session]:
        found = []
        for (text, _, _), kind in zip(texts, kinds, strict=False):
            drafter = RandomTrees(VOCAB) if kind == 5 else drafters[kind]
            found.append(drafter.session(text))
        return found

    budgets, least = [budget for _, budget, _ in texts], [min_prob for _, _, min_prob in texts]
    alone = [
        session.propose(budget, min_prob) if budget else DraftTree.empty()
        for session, budget, min_prob in zip(sessions(), budgets, least, strict=True)
    ]
    assert propose_many(sessions(), budgets, least) == alone


@pytest.mark.parametrize("mixed", [False, True])
def test_a_store_is_asked_once(mixed: bool) -> None:
    recorder = Recorder()
    drafter: Any = Mixture([RequestDrafter(VOCAB), recorder]) if mixed else recorder
    sessions = [drafter.session([number, number + 1]) for number in range(5)]
    propose_many(sessions, [16] * 5, [0.0] * 5)
    propose_many(sessions, [16, 0, 16, 8, 16], [0.0] * 5)
    assert [len(contexts) for contexts, _, _ in recorder.calls] == [5, 3, 1]


def test_texts_with_and_without_states_are_asked_about_apart() -> None:
    """A release of the lookup service may become known between two texts."""
    recorder = Recorder()
    early = ContextSession(recorder, [1])
    recorder.hidden_size = 2
    late = ContextSession(recorder, [2], np.ones(2, np.float32))
    propose_many([early, late], [8, 8], [0.0, 0.0])
    assert [contexts[0][-1] for contexts, _, _ in recorder.calls] == [1, 2]
    assert recorder.hidden is not None

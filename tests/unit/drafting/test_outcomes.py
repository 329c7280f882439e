"""Outcomes by source: what each drafted, or why it drafted nothing."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.drafter import DisabledSession
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.outcomes import counted, outcomes
from draftstore.drafting.request import RequestDrafter
from draftstore.remote.client import RemoteStore
from draftstore.trees.tree import DraftTree

VOCAB = 5
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@given(prompt=ids, new=ids, prediction=ids, budget=st.integers(0, 9))
def test_each_source_is_counted_as_if_it_drafted_alone(
    prompt: list[int], new: list[int], prediction: list[int], budget: int
) -> None:
    drafters = [RequestDrafter(VOCAB), RequestDrafter(VOCAB, prediction=prediction)]
    session = Mixture(drafters).session(prompt)
    tree, tokens = session.propose(budget), np.array(new, np.int32)
    alone = [drafter.session(prompt).propose(budget) for drafter in drafters]
    session.observe(tokens)
    found = outcomes(session, tree, tokens)
    expected = [(len(each), len(each.accepted(tokens)), "" if len(each) else "no_match") for each in alone]
    assert found == (expected if budget else [])


def test_an_empty_draft_has_a_reason(tmp_path: Path) -> None:
    class Breaks(DisabledSession):
        def session(self, *_: Any, **__: Any) -> DisabledSession:
            return self

        def propose(self, *_: Any) -> DraftTree:
            raise MemoryError

    store = RemoteStore(tmp_path / "nobody.sock", "chat", vocab_size=VOCAB)
    session = Mixture([RequestDrafter(VOCAB), Breaks(), store.drafter()]).session([1])
    labels, counts = ["request", "broken", "lookup:chat"], Counter[tuple[str, str]]()
    for budget in (4, 4, 0):
        tree = session.propose(budget)
        session.observe([2])
        counts += counted(labels, outcomes(session, tree, np.array([2], np.int32)))
    assert counts == {
        ("request", "no_match"): 2, ("request", "budget"): 1, ("broken", "failed"): 2, ("broken", "budget"): 1,
        ("lookup:chat", "unreachable"): 1, ("lookup:chat", "skipped"): 1, ("lookup:chat", "budget"): 1,
    }  # fmt: skip

"""Outcomes by source: what each drafted, or why it drafted nothing."""

from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.mixture import Mixture
from draftstore.drafting.outcomes import counted
from draftstore.drafting.request import RequestDrafter
from draftstore.remote.client import RemoteStore
from tests.fakes.scripted import Broken

VOCAB = 5
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@given(prompt=ids, new=ids, prediction=ids, budget=st.integers(0, 9))
def test_each_source_is_counted_as_if_it_drafted_alone(
    prompt: list[int], new: list[int], prediction: list[int], budget: int
) -> None:
    drafters = [RequestDrafter(VOCAB), RequestDrafter(VOCAB, prediction=prediction)]
    session = Mixture(drafters).session(prompt)
    tokens = np.array(new, np.int32)
    session.propose(budget)
    alone = [drafter.session(prompt).propose(budget) for drafter in drafters]
    session.observe(tokens)
    expected = [(len(each), len(each.accepted(tokens)), "" if len(each) else "no_match") for each in alone]
    assert session.slots.outcomes([session.slot]).of(0) == (expected if budget else [])


def test_an_empty_draft_has_a_reason(tmp_path: Path) -> None:
    store = RemoteStore(tmp_path / "nobody.sock", "chat", vocab_size=VOCAB)
    session = Mixture([RequestDrafter(VOCAB), Broken(), store.drafter()]).session([1])
    labels, counts = ["request", "broken", "lookup:chat"], Counter[tuple[str, str]]()
    for budget in (4, 4, 0):
        session.propose(budget)
        session.observe([2])
        counts += counted(labels, session.slots.outcomes([session.slot]).of(0))
    assert counts == {
        ("request", "no_match"): 2, ("request", "budget"): 1, ("broken", "failed"): 2, ("broken", "budget"): 1,
        ("lookup:chat", "unreachable"): 1, ("lookup:chat", "skipped"): 1, ("lookup:chat", "budget"): 1,
    }  # fmt: skip

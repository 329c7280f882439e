"""Partitions as one drafter: what they say is added up by the length of their matches, against a slow oracle."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from draftstore.drafting.drafter import propose_batch
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.partitions import PartitionedDrafter, join_drafts
from draftstore.errors import DraftstoreError
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree, highest_level
from tests import reference
from tests.examples import examples
from tests.reference import Nodes, UnclearError, make_index, nodes_of
from tests.unit.drafting.test_mixture import tree_from
from tests.unit.trees.test_blend import trees

VOCAB = 9
RNG = np.random.default_rng(4)
DOCUMENTS = [((RNG.zipf(1.5, 60) - 1) % VOCAB).tolist() for _ in range(12)]


def part(first: int, step: int, strategy: str = "backoff") -> RestDrafter:
    return RestDrafter(make_index([DOCUMENTS[first::step]], VOCAB), STRATEGIES[strategy])


def draft_of(nodes: Nodes, length: int, count: int) -> Draft:
    return Draft(tree_from(nodes), length, count) if nodes else Draft(DraftTree.empty(), 0, 0)


@examples(300)
@given(
    st.lists(
        st.tuples(st.one_of(st.just([]), trees()), st.integers(1, 16), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 40),
    st.integers(0, 255),
)
def test_shares_double_with_every_token_of_a_match(
    said: list[tuple[Nodes, int, int]], budget: int, max_level: int
) -> None:
    found = [each for each in said if each[0]]
    weights = [2.0**length for _, length, _ in found]
    try:
        expected = reference.blend_trees(
            [nodes for nodes, _, _ in found],
            [weight / sum(weights) for weight in weights],
            budget,
            63,
            max_level,
        )
    except UnclearError:
        reject()
    joined = join_drafts([draft_of(*each) for each in said], budget, max_level)
    assert nodes_of(joined.tree) == expected
    longest = max((length for _, length, _ in found), default=0)
    assert joined.match_length == longest
    assert joined.match_count == sum(count for _, length, count in found if length == longest)


@examples(50)
@given(trees(), st.integers(1, 16))
def test_single_matching_partition_is_unchanged(nodes: Nodes, length: int) -> None:
    alone = draft_of(nodes, length, 3)
    for others in ([], [draft_of([], 0, 0)] * 3):
        joined = join_drafts([*others, alone], 64, 255)
        assert (joined.tree, *joined[1:]) == (alone.tree, *alone[1:])


@pytest.mark.parametrize("budget", [0, 1, 16, 64])
@pytest.mark.parametrize("min_prob", [0.0, 0.05, 1.5])
def test_drafts_are_those_of_the_partitions_joined(budget: int, min_prob: float) -> None:
    parts = [part(first, 3) for first in range(3)]
    drafter = PartitionedDrafter(parts)
    drafter.warm_up()
    contexts = np.array([DOCUMENTS[0][8:24], [-1] * 15 + [3], [-1] * 16], np.int32)
    drafts = drafter.draft(contexts, budget, min_prob)
    level = highest_level(min_prob) if min_prob > 0 else 255
    if budget == 0 or level < 0:
        assert [len(draft.tree) for draft in drafts] == [0, 0, 0]
        return
    for i, draft in enumerate(drafts):
        expected = join_drafts([each.draft(contexts[i : i + 1], budget)[0] for each in parts], budget, level)
        assert (draft.tree, *draft[1:]) == (expected.tree, *expected[1:])
    sessions = [drafter.session(context[context >= 0]) for context in contexts]
    assert propose_batch(drafter, sessions, budget, min_prob) == [draft.tree for draft in drafts]


def test_partitions_are_one_source_of_a_mixture() -> None:
    drafter = PartitionedDrafter([part(0, 2), part(1, 2)])
    session = Mixture([drafter]).session([1, 2, 3])
    assert session.propose(8) == drafter.session([1, 2, 3]).propose(8)
    both: Any = Mixture([drafter, part(0, 1)]).session([1, 2, 3])
    assert len(both.propose(8)) == 8
    assert both.proposed[0] == drafter.session([1, 2, 3]).propose(8)


def test_invalid_partitions_are_refused() -> None:
    other = RestDrafter(make_index([[[1, 2, 3]]], VOCAB + 1), STRATEGIES["longest"])
    with pytest.raises(DraftstoreError, match=r"vocabularies of \[9, 10\] ids"):
        PartitionedDrafter([part(0, 2), other])
    with pytest.raises(DraftstoreError, match="expected one size"):
        PartitionedDrafter([])
    dense: Any = part(0, 2)
    dense.projection = object()
    with pytest.raises(DraftstoreError, match="dense"):
        PartitionedDrafter([dense])

"""Memory of live stores, against an oracle of growing texts and against the content of a smaller memory."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from draftstore.drafting.drafter import check_budget
from draftstore.live.memory import LEAST, RULES, Memory, MemoryDrafter
from draftstore.trees.tree import DraftTree
from tests import reference
from tests.reference import UnclearError, nodes_of

VOCAB = 6
DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=12)
CONTEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def drafts_of(memory: Memory, context: list[int], strategy: str = "sole", budget: int = 12) -> DraftTree:
    return MemoryDrafter(memory, strategy).draft(np.array([context], np.int32), budget)[0].tree


@pytest.mark.parametrize("strategy", [*RULES])
@given(DOCUMENTS, CONTEXTS)
def test_drafts_agree_with_the_oracle(strategy: str, documents: list[list[int]], context: list[int]) -> None:
    memory = Memory(VOCAB, 1000)
    for document in documents:
        memory.append(document)
    # Each end of a document is a token of its own there, so that nothing reaches across it.
    text = list(chain.from_iterable([*document, -1 - at] for at, document in enumerate(documents)))
    rule = RULES[strategy]

    def shares(path: tuple[int, ...], prob: float, floor: float) -> dict[int, float]:
        return reference.request_shares(text, [*context, *path], rule, prob, floor)

    try:
        most = check_budget(1, LEAST[strategy])
        expected = reference.best_first(shares, rule.depth, rule.floor, 12, most)
    except UnclearError:
        reject()
    assert nodes_of(drafts_of(memory, context, strategy)) == expected


@given(DOCUMENTS, CONTEXTS, st.integers(1, 40))
def test_the_oldest_tokens_make_room(documents: list[list[int]], context: list[int], room: int) -> None:
    memory = Memory(VOCAB, room)
    for document in documents:
        memory.append(document)
    text = list(chain.from_iterable([*document, -1] for document in documents))[-room:]
    last = Memory(VOCAB, 1000)
    for part in " ".join(map(str, text)).split("-1")[:-1]:
        last.append([int(token) for token in part.split()])
    assert len(memory) == len(text)
    assert drafts_of(memory, context) == drafts_of(last, context)

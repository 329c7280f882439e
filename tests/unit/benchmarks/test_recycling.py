"""The benchmark of Token Recycling replays what was said, and tells each way what it may know."""

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.recycling import Told, ToldTarget, drafters_of, replay_told
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of

VOCAB = 40


def told(prompt: list[int], output: list[int]) -> Told:
    """Return an answer of a model that always says what it says, and holds the number after that likely, too."""
    ids = [*prompt, *output]
    rows: NDArray[np.int32] = np.full((len(ids), 8), -1, np.int32)
    rows[:-1, 0] = ids[1:]
    rows[:, 1] = [(first + 1) % VOCAB for first in rows[:, 0].tolist()]
    return Told("chat", np.array(prompt, np.int32), np.array(output, np.int32), rows)


def test_candidates_lie_along_the_answer() -> None:
    target = ToldTarget(told([1, 2], [3, 4, 5, 6]))
    tree = tree_of([(4, 5), (9,)])
    target.verify(tree)
    rows = target.candidates()
    first = {int(token): int(row[0]) for token, row in zip(tree.tokens, rows[1:], strict=True)}
    assert rows[0, 0] == 4
    assert first == {4: 5, 5: 6, 9: -1}
    target.verify(DraftTree.empty())
    assert target.candidates()[:, 0].tolist() == [4]


@pytest.mark.parametrize("hot", [False, True])
def test_who_is_told_more_accepts_more(hot: bool) -> None:
    texts = [told([1, 2, 3, 4, 5, 6, 7, 1], [2, 3, 4, 5, 6, 7]), told([11, 12, 13, 11], [12, 13, 11])]
    ways = {
        name: replay_told(make, texts, 8, hot=hot).accepted_length
        for name, make in drafters_of(VOCAB).items()
    }
    assert ways["last row"] < ways["prompt"] <= ways["both"]
    assert ways["last row"] <= ways["guesses"] <= ways["both"]
    assert replay_told(lambda: RecyclingDrafter(VOCAB), texts, 8, hot=hot).accepted_length == ways["both"]

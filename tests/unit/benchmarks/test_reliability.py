"""Calibration of drafts as `benchmarks.quality` reports it, on drafts whose outcome is known."""

import numpy as np
import pytest

from benchmarks.reliability import BINS, Reliability, steps_of
from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.request import RequestDrafter
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of

TREE = tree_of({(1,): 0.5, (1, 2): 0.25, (1, 3): 0.125, (4,): 0.25, (4, 2): 0.125})


def judged(tree: DraftTree, *coming: int) -> Reliability:
    reliability = Reliability()
    reliability.add(tree, np.array(coming, np.int32))
    return reliability


def test_paths_and_children_of_taken_nodes_are_judged() -> None:
    path, given = judged(TREE, 1, 3, 9).sums.sum(axis=1)
    np.testing.assert_allclose(path, [5, 0.5 + 2 * 0.25 + 2 * 0.125, 2])  # 1 and 1 3 are taken
    np.testing.assert_allclose(
        given, [4, 0.5 + 0.25 + 0.5 + 0.25, 2]
    )  # of these 4 2 hangs on what is not taken


def test_what_is_deeper_than_the_text_is_not_judged() -> None:
    path, given = judged(TREE, 1).sums.sum(axis=1)
    np.testing.assert_allclose(path, [2, 0.75, 1])
    np.testing.assert_allclose(given, path)
    assert not judged(TREE).sums.any()


def test_the_error_is_the_mean_distance_over_bins() -> None:
    reliability = judged(TREE, 1, 3, 9)
    summary = reliability.summary()["path"]
    assert [count for count, *_ in summary["bins"]] == [2, 2, 1]
    assert summary["ece"] == pytest.approx((abs(0.25 - 1) + abs(0.5 - 0) + abs(0.5 - 1)) / 5, abs=1e-4)
    assert summary["promised"] == pytest.approx(1.25 / 2)
    assert Reliability().summary()["path"] == {"ece": 0.0, "promised": None, "bins": []}


def test_drafts_that_keep_their_promise_have_no_error() -> None:
    reliability = Reliability()
    for coming in (1, 2, 3, 4):
        reliability.add(tree_of({(1,): 0.25, (2,): 0.25, (3,): 0.25}), np.array([coming], np.int32))
    assert reliability.summary()["path"] == {"ece": 0.0, "promised": 1.0, "bins": [[12, 0.25, 0.25]]}
    assert int(0.25 * BINS) == 5


def test_steps_are_those_of_a_replay() -> None:
    text = np.tile(np.arange(5, dtype=np.int32), 6)
    recording, drafter = Recording("one", text[:7], text[7:]), RequestDrafter(8)
    steps = list(steps_of(drafter, recording, 4))
    result = replay(drafter, [recording], budget=4)
    assert len(steps) == result.passes
    assert sum(len(step.tokens) for step, _ in steps) == result.tokens
    for step, coming in steps:
        np.testing.assert_array_equal(coming[: len(step.tokens)], step.tokens)
    assert not list(steps_of(drafter, Recording("short", text[:3], text[:1]), 4))

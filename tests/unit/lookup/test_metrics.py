from pathlib import Path

import numpy as np
import pytest

from draftstore.remote.wire import Status, frame
from draftstore.trees.batch import DraftBatch
from services.lookup.metrics import SECONDS_BUCKETS, Figures, Metrics, percentile
from tests.fakes.lookups import contexts_of, failure, serving
from tests.fakes.served import read_samples
from tests.fakes.waiting import until


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    return read_samples(metrics.text())[f"draftstore_{name}", tuple(sorted(labels.items()))]


def drafts(sizes: list[int], matches: list[int]) -> DraftBatch:
    """Return drafts of so many nodes, with matches of so many tokens."""
    empty = DraftBatch.empty(len(sizes))
    return empty._replace(sizes=np.array(sizes, np.int32), match_lengths=np.array(matches, np.int32))


def test_answers_and_failures_are_counted_by_release(small_store: Path) -> None:
    with serving({"rest": small_store, "other": small_store}) as lookups, lookups.caller() as caller:
        answered = caller.draft("rest", contexts_of(small_store, 12), budget=8).drafts.drafts()
        failure(caller.draft_frame("nowhere", contexts_of(small_store, 1)))
        failure(caller.draft_frame("rest", contexts_of(small_store, 1), strategy="worst"))
        failure(caller.ask(frame(99, caller.next_id())))
        metrics = lookups.metrics
        until(lambda: sample(metrics, "contexts_total", release="rest") == 12)  # counted after the answer
        assert sample(metrics, "misses_total", release="rest") == sum(not len(one.tree) for one in answered)
        assert sample(metrics, "nodes_total", release="rest") == sum(len(one.tree) for one in answered)
        matched = sum(one.match_length for one in answered)
        assert sample(metrics, "matched_tokens_total", release="rest") == matched
        assert sample(metrics, "lookup_seconds_count", release="rest") == 1
        assert sample(metrics, "contexts_total", release="other") == 0
        assert sample(metrics, "failures_total", release="rest", status="not_found") == 1
        assert sample(metrics, "failures_total", release="", status="not_found") == 1
        assert sample(metrics, "failures_total", release="", status="bad_request") == 1
        assert sample(metrics, "connections") == 1
        assert "nowhere" not in metrics.text().decode()


def test_live_figures_are_those_of_the_window() -> None:
    metrics, now = Metrics(), 0.0
    figures = Figures(metrics, lambda: now)
    for second in range(1, 101):
        now = float(second)
        for _ in range(1 if second <= 80 else 3):
            metrics.of("chat").answer(drafts([0, 60], [2, 4]), 10, 10, SECONDS_BUCKETS[0] / 2)
        metrics.nothing.fail(Status.NOT_FOUND)
        figures.sample()
    report = figures.report(lambda _: True)
    [chat] = report["releases"]
    assert chat["name"] == "chat"
    assert (report["window_s"], report["uptime_s"]) == (10.0, 100.0)
    assert (chat["queries_per_s"], chat["queries"]) == (3.0, 140)
    assert (chat["miss_rate"], chat["match_length"], chat["nodes"]) == (0.5, 3.0, 30.0)
    assert (report["total"]["queries"], report["total"]["failures"]) == (140, 100)
    assert (len(report["history"]), report["history"][0], report["history"][-1]) == (60, 1.0, 3.0)
    other = figures.report(lambda name: name == "other")
    assert (other["releases"], other["total"]["queries"], other["total"]["p50_us"]) == ([], 0, None)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({}, 0.5, None),
        ({0: 10}, 0.5, 12.5),
        ({1: 10}, 0.5, 37.5),
        ({0: 50, 1: 50}, 0.5, 25.0),
        ({14: 10}, 0.99, 100_000.0),
    ],
)
def test_percentiles(counts: dict[int, int], share: float, expected: float | None) -> None:
    histogram = np.zeros(len(SECONDS_BUCKETS) + 1)
    histogram[list(counts)] = list(counts.values())
    assert percentile(histogram, share) == expected

"""Figures of drafts inside an engine: as Prometheus reads them, and the warning of a fall."""

import logging
from urllib.request import urlopen

import pytest

from draftstore.engines.figures import LEAST_STEPS, WINDOW, Decline, DraftFigures, serve_metrics
from draftstore.errors import EngineError
from tests.fakes.adversaries import tree_of


def test_prometheus_reads_them() -> None:
    figures = DraftFigures("vllm")
    figures.add("", tree_of([(1, 2, 3)]), [0, 1], {"rest:chat": 2, "request:it": 0})
    figures.add("acme", tree_of([]), [], {})
    port = serve_metrics(figures, 0)
    text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    for line in (
        'draftstore_engine_steps_total{corpus="",engine="vllm"} 1.0',
        'draftstore_engine_steps_total{corpus="acme",engine="vllm"} 1.0',
        'draftstore_engine_drafted_tokens_total{corpus="",engine="vllm"} 3.0',
        'draftstore_engine_accepted_tokens_total{corpus="",engine="vllm"} 2.0',
        'draftstore_engine_accepted_tokens_per_position_total{corpus="",engine="vllm",position="1"} 1.0',
        'draftstore_engine_predicted_tokens_total{corpus="",engine="vllm",source="rest:chat"} 2.0',
        'draftstore_engine_failures_total{engine="vllm"} 0.0',
    ):
        assert line in text


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", -1])
def test_no_metrics_at_an_address_that_is_none(address: str | int) -> None:
    with pytest.raises(EngineError, match="no metrics at"):
        serve_metrics(DraftFigures("vllm"), address)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def windows(decline: Decline, clock: Clock, lengths: list[int], steps: int = LEAST_STEPS) -> list[bool]:
    """Let windows pass, of some accepted length each; return in which there was a warning."""
    warned = []
    for length in lengths:
        found = [decline.add(length) for _ in range(steps)]
        clock.seconds += WINDOW
        warned.append(any(found))
    return warned


def test_a_fall_by_a_third_is_told_once() -> None:
    clock = Clock()
    decline = Decline(clock)
    assert windows(decline, clock, [3, 3, 3, 2, 1, 1, 1]) == [False] * 5 + [True, False]
    assert not any(windows(decline, clock, [1] * 30))


def test_few_steps_and_slow_falls_tell_nothing() -> None:
    clock = Clock()
    decline = Decline(clock)
    assert not any(windows(decline, clock, [9, 1, 9, 1, 9], steps=LEAST_STEPS - 1))
    slow = [9] * 12 + [7] * 12 + [5] * 12 + [4] * 12 + [3] * 12
    assert not any(windows(decline, clock, slow))


def test_an_hour_of_rest_forgets() -> None:
    clock = Clock()
    decline = Decline(clock)
    windows(decline, clock, [9, 9])
    clock.seconds += 12 * WINDOW
    assert not any(windows(decline, clock, [1, 1, 1]))


def test_the_warning_names_the_corpus(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    figures, tree = DraftFigures("vllm", clock), tree_of([(1, 2)])
    with caplog.at_level(logging.WARNING):
        for path in ([0, 1], [], []):
            for _ in range(LEAST_STEPS):
                figures.add("acme", tree, path, {})
            clock.seconds += WINDOW
        figures.add("acme", tree, [], {})
    assert "accepted length of corpus 'acme' fell from 3.00 to 1.00 within an hour" in caplog.text

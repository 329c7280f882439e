"""The benchmark of the worker counts right, and notices what differs."""

from typing import Any

import pytest

from benchmarks import serving
from benchmarks.serving_clients import Reply, Together, likely_tokens, parting_margin


def piece(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "logprobs": None, **more}], "usage": None}


def replies(*texts: str, first: float = 1.0, seconds: float = 4.0, passes: int = 2) -> Together:
    usage = {"completion_tokens": 5, "draftstore": {"passes": passes, "drafted": 6}}
    return Together([Reply(first, seconds, text, [], usage) for text in texts])


def test_a_stream_is_read_with_its_times() -> None:
    reply = Reply()
    told = {"text_offset": [0, 2], "top_logprobs": [{"a": -1.0, "b": -0.5}, {"c": -0.1}]}
    reply.take(piece(""), 0.5)
    reply.take(piece("ab", logprobs=told), 0.75)
    reply.take(piece("c"), 1.0)
    reply.take({"choices": [], "usage": {"completion_tokens": 2}}, 1.5)
    assert (reply.first, reply.text, reply.usage) == (0.75, "abc", {"completion_tokens": 2})
    assert likely_tokens(reply) == [(0, 0.5), (2, 0.0)]


def test_figures_of_requests_together() -> None:
    together = replies("a", "b")
    assert (together.tokens, together.seconds, together.rate) == (10, 4.0, 2.5)
    assert (together.passes, together.drafted, together.accepted_length) == (4, 12, 2.0)


@pytest.mark.parametrize(
    ("found", "margin"),
    [("one two four", 0.5), ("one twice", 0.25), ("one", 0.25), ("two", 2.0), ("one two three more", 0.5)],
)
def test_the_margin_where_texts_part(found: str, margin: float) -> None:
    """Tokens are `one`, ` tw`, `o`, ` three`; where the place is inside a token, the one before it counts too."""
    likely = [(0, 2.0), (3, 0.25), (6, 1.0), (7, 0.5)]
    assert parting_margin("one two three", found, likely) == margin


def test_goals_are_ratios_of_rounds() -> None:
    done = {
        serving.SINGLE: [replies("a", "b")] + [replies("a", "b", first=8, seconds=seconds) for seconds in (8, 16, 8)],
        serving.SINGLE_DRAFTS: [replies("a", "b")] * 4,
        serving.BATCH: [replies("a", "b")] * 4,
        serving.BATCH_DRAFTS: [replies("a", "c", seconds=2)] * 4,
        serving.STEADY: [replies(*"abab", seconds=8)] * 4,
        serving.STEADY_DRAFTS: [replies(*"abab", seconds=5)] * 4,
    }  # fmt: skip
    likely = [[(0, 1.0)], [(0, 1e-5)]]
    rows = serving.figures_of(done, likely)
    assert [row["tokens_per_second"] for row in rows] == [1.25, 2.5, 2.5, 5.0, 2.5, 4.0]
    assert rows[0]["first_token_seconds"] == [8, 8]
    assert [len(row["differences"]) for row in rows] == [0, 0, 0, 1, 0, 0]
    found = serving.reached(done, rows)
    assert found["ratios"] == {
        "batch_over_single": 2.0,
        "drafts_over_batch": 2.0,
        "drafts_over_single_drafts": 2.0,
        "drafts_over_batch_steady": 1.6,
        "first_token_of_last": 1.0,
    }
    assert found["reached"] == {
        "batch_over_single": True,
        "drafts_over_batch": True,
        "first_token_of_last": False,
    }
    assert found["lossless"]
    assert not serving.reached(done, serving.figures_of(done, [[(0, 1.0)]] * 2))["lossless"]
    serving.show(rows, "two requests")

"""The decoding worker from its clients' view: simultaneous requests, and clients that repeat requests."""

import http.client
import json
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.decoding.texts import Text
from benchmarks.measure import progress
from benchmarks.processes import decoding_worker

ANSWER_SECONDS = 1800.0
"""Time limit of an answer in seconds."""
STEADY = 3
"""Consecutive requests of a client if the batch is kept full."""


class Way(NamedTuple):
    """A mode of serving: whether the worker batches answers, whether it drafts, and requests per client."""

    name: str
    together: bool
    drafts: bool
    requests: int


WAYS = [
    Way(name + (", drafts" if drafts else ""), together, drafts, requests)
    for name, together, requests in (
        ("one by one", False, 1),
        ("together", True, 1),
        ("each asks again", True, STEADY),
    )
    for drafts in (False, True)
]


class Reply(NamedTuple):
    """An answer: seconds to its first text, time of its end (`perf_counter`), and the worker's figures."""

    first: float
    end: float
    text: str
    usage: dict[str, Any]


def measure_serving(
    model: Path, dtype: str, text: Text, curve: Path, log: Path, args: Namespace
) -> list[dict[str, Any]]:
    """Run the clients of all modes, alternating, one client per prompt; return the figures of each mode.

    An untimed round precedes those of the command line. `curve` is the file of the cost curve, `log` that of the
    workers' output.
    """
    with ExitStack() as stack:
        urls = {}
        for together in (False, True):
            batch = len(text.prompts) if together else 1
            options = ("--dtype", dtype, "--store", text.rest.path, "--curve", curve, "--max-batch", batch)
            worker = decoding_worker(model, log, *options, device=args.device, threads=args.threads)
            urls[together] = stack.enter_context(closing(worker)).wait_until_ready().url
        done: dict[str, list[dict[str, Any]]] = {way.name: [] for way in WAYS}
        for turn in range(1 + args.rounds):
            progress(f"serving, round {turn} of {args.rounds}")
            for way in (*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]):
                done[way.name].append(_round(urls[way.together], way, text.prompts, args.tokens))
    expected = done[WAYS[0].name][0]["texts"]
    return [_figures(name, rounds, expected) for name, rounds in done.items()]


def _round(url: str, way: Way, prompts: Sequence[NDArray[np.int32]], tokens: int) -> dict[str, Any]:
    """Have all clients send one or several requests; return the results."""
    settings: dict[str, Any] = {"max_tokens": tokens, "temperature": 0}
    if not way.drafts:
        settings["draftstore"] = {"budget": 0}
    begin = perf_counter()

    def client(prompt: NDArray[np.int32]) -> list[Reply]:
        return [_ask(url, prompt, settings) for _ in range(way.requests)]

    with ThreadPoolExecutor(len(prompts)) as threads:
        clients = list(threads.map(client, prompts))
    replies = [reply for each in clients for reply in each]
    spent = max(reply.end for reply in replies) - begin
    count = sum(reply.usage["completion_tokens"] for reply in replies)
    passes = sum(reply.usage["draftstore"]["passes"] for reply in replies)
    return {
        "tokens_per_second": count / spent,
        "first_token_seconds": max(reply.first for reply in replies),
        "accepted_length": (count - len(replies)) / max(1, passes),
        "texts": [[reply.text for reply in each] for each in clients],
    }


def _ask(url: str, prompt: NDArray[np.int32], settings: dict[str, Any]) -> Reply:
    """Request a stream and read it to its end."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_SECONDS)
    body = {"prompt": prompt.tolist(), "stream": True, "stream_options": {"include_usage": True}, **settings}
    begin, first, text, usage = perf_counter(), 0.0, "", dict[str, Any]()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    stream = connection.getresponse()
    if stream.status != 200:
        raise SystemExit(f"the worker refused a request: {stream.read().decode()}")
    for line in stream:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise SystemExit(f"the worker broke off an answer: {event['error']['message']}")
            usage = event.get("usage") or usage
            text += "".join(choice["text"] for choice in event["choices"])
            first = first or (perf_counter() - begin if text else 0.0)
    connection.close()
    return Reply(first, perf_counter(), text, usage)


def _figures(name: str, rounds: list[dict[str, Any]], expected: list[list[str]]) -> dict[str, Any]:
    """Return the medians of a mode's timed rounds, and the number of answers that differ from the first mode's."""
    keys = ("tokens_per_second", "first_token_seconds", "accepted_length")
    found: dict[str, Any] = {key: round(median(each[key] for each in rounds[1:]), 3) for key in keys}
    differ = sum(
        text != own[0]
        for each in rounds
        for own, texts in zip(expected, each["texts"], strict=True)
        for text in texts
    )
    rates = [round(each["tokens_per_second"], 2) for each in rounds[1:]]
    return {"way": name, **found, "rates": rates, "differ": differ}

"""Clients that ask the decoding worker at the same time, and note when the words come."""

import dataclasses
import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

SECONDS = 1800.0
"""Time limit for an answer, in seconds."""


@dataclasses.dataclass
class Reply:
    """One client's answer.

    Attributes:
        first: seconds from its request to its first text.
        seconds: seconds from the first request of all to its end.
        text: the answer.
        logprobs: log-probabilities by token, if asked for: for each token of the answer its place in the text, and
            those of the most likely tokens.
        usage: the worker's figures.
    """

    first: float = 0.0
    seconds: float = 0.0
    text: str = ""
    logprobs: list[tuple[int, list[float]]] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)

    def take(self, document: dict[str, Any], seconds: float) -> None:
        """Take an event of the stream."""
        self.usage = document.get("usage") or self.usage
        for choice in document["choices"]:
            if choice["text"] and not self.text:
                self.first = seconds
            self.text += choice["text"]
            found = choice["logprobs"] or {"text_offset": [], "top_logprobs": []}
            for offset, top in zip(found["text_offset"], found["top_logprobs"], strict=True):
                self.logprobs.append((offset, list(top.values())))


@dataclasses.dataclass
class Together:
    """The answers of clients that ask at the same time, in the order of their requests."""

    replies: list[Reply]

    @property
    def seconds(self) -> float:
        """Seconds until the last answer ended."""
        return max(reply.seconds for reply in self.replies)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(reply.usage["completion_tokens"] for reply in self.replies)

    @property
    def rate(self) -> float:
        """Tokens a second, of all together."""
        return self.tokens / self.seconds

    @property
    def passes(self) -> int:
        """Forward passes in which an answer took part, after its prefill, summed over the answers."""
        return sum(reply.usage["draftstore"]["passes"] for reply in self.replies)

    @property
    def drafted(self) -> int:
        """Tokens that were drafted and verified."""
        return sum(reply.usage["draftstore"]["drafted"] for reply in self.replies)

    @property
    def accepted_length(self) -> float:
        """M: tokens that a pass yields to an answer."""
        return (self.tokens - len(self.replies)) / max(1, self.passes)


def ask_together(
    url: str, prompts: Sequence[NDArray[np.int32]], asked: dict[str, Any], *, clients: int
) -> Together:
    """Have every client ask for a completion, one right after the other, and for the next once it is answered.

    Args:
        url: of the worker.
        prompts: int32 [any] each, at least as many as there are clients.
        asked: the other fields of the requests.
        clients: how many there are.

    Raises:
        SystemExit: one is refused or fails.
    """
    begin = perf_counter()
    first = [_send(url, prompt, asked) for prompt in prompts[:clients]]

    def answer(place: int) -> Reply:
        return _read(*(first[place] if place < clients else _send(url, prompts[place], asked)), begin)

    with ThreadPoolExecutor(clients) as threads:
        return Together(list(threads.map(answer, range(len(prompts)))))


def _send(
    url: str, prompt: NDArray[np.int32], asked: dict[str, Any]
) -> tuple[http.client.HTTPConnection, float]:
    """Send a request for a stream; return its connection and when it was sent."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
    body = {"prompt": prompt.tolist(), "stream": True, "stream_options": {"include_usage": True}, **asked}
    sent = perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection, sent


def _read(connection: http.client.HTTPConnection, sent: float, begin: float) -> Reply:
    """Read a stream to its end.

    Raises:
        SystemExit: there is none, or it breaks off.
    """
    answer = connection.getresponse()
    reply = Reply()
    if answer.status != 200:
        raise SystemExit(f"the worker refuses a request: {answer.read().decode()}")
    for line in answer:
        if line.startswith(b"data: {"):
            document = json.loads(line.removeprefix(b"data: "))
            if "error" in document:
                raise SystemExit(f"the worker breaks off an answer: {document['error']['message']}")
            reply.take(document, perf_counter() - sent)
    reply.seconds = perf_counter() - begin
    connection.close()
    return reply


def likely_tokens(reply: Reply) -> list[tuple[int, float]]:
    """Return for each token its place in the text, and how far apart the two most likely ones were there."""
    margins = [(offset, sorted(values, reverse=True)[:2]) for offset, values in reply.logprobs]
    return [(offset, best[0] - best[-1]) for offset, best in margins]


def parting_margin(expected: str, found: str, likely: Sequence[tuple[int, float]]) -> float:
    """Return how far apart the two most likely tokens were where two texts part.

    The last two tokens that begin up to there count: two tokens may begin with the same characters.

    Args:
        expected: the text whose tokens are known.
        found: the other text.
        likely: see `likely_tokens`.
    """
    pairs = zip_longest(expected, found)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), len(expected))
    margins = [margin for offset, margin in likely if offset <= place]
    return min(margins[-2:], default=float("inf"))

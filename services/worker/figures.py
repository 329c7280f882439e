"""The metrics of the worker, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

import draftstore
from services.worker.vllm_names import VllmNames
from services.worker.work import Facts
from services.worker.writing import Usage

OUTCOMES = ("stop", "length", "cancelled", "failed", "refused")
"""Outcomes of requests: the answer ended by itself, or at its limit; the client left; an error; not started."""
LOGGED = ("written", "dropped", "failed")
"""Outcomes of response log records: written, dropped (too long, or the disk too slow), failed."""
ENDPOINTS = ("chat", "completions")
FIRST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REQUEST_BUCKETS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
PASS_BUCKETS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
SHARE_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PREFIX = "draftstore_decoding"


class WorkerMetrics:
    """The metrics of one worker, prefixed `draftstore_decoding_` to distinguish them from the lookup service's."""

    def __init__(self) -> None:
        """Start from zero."""
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, labels, buckets=buckets, registry=registry)

        self._requests = counter("requests", "Requests, by what became of them.", "endpoint", "outcome")
        self._prompt = counter("prompt_tokens", "Tokens of prompts that were decoded.")
        self._tokens = counter("completion_tokens", "Tokens of answers, unfinished ones included.")
        self._passes = counter("passes", "Forward passes after the prefill.")
        self._drafts = counter("drafts", "Passes that verified a draft.")
        self._drafted = counter("drafted_tokens", "Draft tokens that were verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens that became part of an answer.")
        self._accepted_at = counter(
            "accepted_tokens_per_position", "The same by their place in the accepted path.", "position"
        )
        self._lines = counter("response_log_lines", "Answers for the response log.", "outcome")
        self._first = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", FIRST_BUCKETS
        )
        self._token = histogram(
            "seconds_per_token",
            "Time of the tokens after the first, mean, of requests for one answer.",
            TOKEN_BUCKETS,
        )
        self._request = histogram(
            "request_seconds", "From a request to the end of its answer.", REQUEST_BUCKETS
        )
        self._waits = histogram(
            "queue_seconds", "From a request to the start of its decoding.", FIRST_BUCKETS
        )
        self._lengths = histogram(
            "accepted_length",
            "Tokens that each pass yielded, mean of a request; by the release that drafts were asked of.",
            PASS_BUCKETS,
            "release",
        )
        self._texts = histogram("batch_size", "Answers in a forward pass.", BATCH_BUCKETS)
        self._filled = histogram(
            "slots_filled",
            "Share of a pass's attention that is not padding: tokens by columns.",
            SHARE_BUCKETS,
        )
        self._release = ""
        self._depth = Gauge(f"{PREFIX}_queue_depth", "Requests that wait for their turn.", registry=registry)
        self._running = Gauge(f"{PREFIX}_running", "Answers that are being decoded.", registry=registry)
        self._ready = Gauge(f"{PREFIX}_ready", "1 where requests are taken.", registry=registry)
        self._info = Info(f"{PREFIX}_worker", "The version that runs, and its model.", registry=registry)
        self._vllm = VllmNames(
            {
                "num_requests_running": self._running,
                "num_requests_waiting": self._depth,
                "prompt_tokens": self._prompt,
                "generation_tokens": self._tokens,
                "spec_decode_num_drafts": self._drafts,
                "spec_decode_num_draft_tokens": self._drafted,
                "spec_decode_num_accepted_tokens": self._accepted,
                "spec_decode_num_accepted_tokens_per_pos": self._accepted_at,
                "time_to_first_token_seconds": self._first,
                "request_time_per_output_token_seconds": self._token,
                "request_queue_time_seconds": self._waits,
                "e2e_request_latency_seconds": self._request,
            }
        )
        registry.register(self._vllm)
        for endpoint in ENDPOINTS:
            for outcome in OUTCOMES:
                self._requests.labels(endpoint, outcome)
        for outcome in LOGGED:
            self._lines.labels(outcome)
        self.describe(None)

    def describe(self, facts: Facts | None) -> None:
        """Set the model's labels, once they are known."""
        words = {"version": draftstore.__version__}
        if facts:
            self._release, self._vllm.model = facts.release, facts.name
            words |= {"model": facts.name, "device": facts.device, "drafters": ",".join(facts.drafters)}
        self._info.info(words)

    def watch(self, depth: Callable[[], int], running: Callable[[], int], ready: Callable[[], bool]) -> None:
        """Read the decoder's state whenever metrics are collected."""
        self._depth.set_function(depth)
        self._running.set_function(running)
        self._ready.set_function(ready)

    def refused(self, endpoint: str) -> None:
        """Count a request that was refused."""
        self._requests.labels(endpoint, "refused").inc()

    def ended(
        self, endpoint: str, outcome: str, waited: float, seconds: float, first: float | None, usage: Usage
    ) -> None:
        """Count a decoded request.

        Args:
            endpoint: one of `ENDPOINTS`.
            outcome: one of `OUTCOMES`.
            waited: seconds until decoding began.
            seconds: seconds until it ended.
            first: seconds until the first token; None if there was none.
            usage: figures of the answer.
        """
        self._requests.labels(endpoint, outcome).inc()
        self._waits.observe(waited)
        self._request.observe(seconds)
        self._prompt.inc(usage.prompt_tokens)
        self._tokens.inc(usage.completion_tokens)
        self._passes.inc(usage.passes)
        self._drafts.inc(usage.drafts)
        self._drafted.inc(usage.drafted)
        self._accepted.inc(usage.accepted)
        for place, count in usage.accepted_at.items():
            self._accepted_at.labels(str(place)).inc(count)
        if usage.passes:
            self._lengths.labels(self._release).observe(usage.accepted_length)
        if first is not None:
            self._first.observe(first)
            if usage.answers == 1 and usage.completion_tokens > 1:  # several wait between them
                self._token.observe((seconds - first) / (usage.completion_tokens - 1))

    def passed(self, texts: int, filled: float) -> None:
        """Count a forward pass; see `Engine.last_pass`."""
        self._texts.observe(texts)
        self._filled.observe(filled)

    def logged(self, outcome: str) -> None:
        """Count an answer for the response log; `outcome` is one of `LOGGED`."""
        self._lines.labels(outcome).inc()

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

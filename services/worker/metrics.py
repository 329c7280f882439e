"""The metrics of the worker, for Prometheus: under vLLM's names where vLLM has one, else `draftstore_decoding_...`."""

from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

import draftstore
from services.worker.answers import Answer, Facts

REASONS = ("stop", "length", "abort", "error")
"""Why answers ended, in vLLM's terms: by themselves, at their limit, client disconnected, error."""
LOGGED = ("written", "dropped", "failed")
"""Outcomes of response log records: written, dropped (too long, or the disk too slow), failed."""
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
PREFIX = "draftstore_decoding_"
Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class WorkerMetrics:
    """The metrics of one worker."""

    def __init__(self) -> None:
        """Start from zero; figures of decoding begin with `describe`."""
        self._registry = registry = CollectorRegistry()
        self.ready = Gauge(f"{PREFIX}ready", "1 if requests are accepted, else 0.", registry=registry)
        self._info = Info(f"{PREFIX}worker", "The running version and its model.", registry=registry)
        self._info.info({"version": draftstore.__version__})
        self.refused = Counter(f"{PREFIX}requests_refused", "Refused requests.", registry=registry)
        self._passes = Counter(
            f"{PREFIX}passes", "Forward passes after prefills, by answer.", registry=registry
        )
        name = f"{PREFIX}response_log_lines"
        self._lines = Counter(name, "Answers for the response log.", ["outcome"], registry=registry)
        for outcome in LOGGED:
            self._lines.labels(outcome)

    def describe(self, facts: Facts, waiting: Callable[[], int], running: Callable[[], int]) -> None:
        """Begin the figures of decoding, which are labelled with the model; the functions count answers."""
        words = {"model": facts.name, "device": facts.device, "drafters": ",".join(facts.drafters)}
        self._info.info({"version": draftstore.__version__, **words})

        def family(kind: type[Metric], name: str, text: str, *labels: str, **options: Any) -> Metric:
            names = ["model_name", *labels]
            return kind(f"vllm:{name}", text, names, registry=self._registry, **options)

        def one(kind: type[Metric], name: str, text: str, **options: Any) -> Metric:
            return family(kind, name, text, **options).labels(facts.name)

        one(Gauge, "num_requests_running", "Answers being decoded.").set_function(running)
        one(Gauge, "num_requests_waiting", "Answers waiting to be decoded.").set_function(waiting)
        ended = family(Counter, "request_success", "Answers by finish reason.", "finished_reason")
        self._ended = {reason: ended.labels(facts.name, reason) for reason in REASONS}
        self._prompt = one(Counter, "prompt_tokens", "Tokens of prompts.")
        self._tokens = one(Counter, "generation_tokens", "Tokens of answers, unfinished ones included.")
        self._drafts = one(Counter, "spec_decode_num_drafts", "Passes that verified a draft.")
        self._drafted = one(Counter, "spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = one(Counter, "spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position in a path."
        places = family(Counter, name, text, "position")
        self._places, self._model = places, facts.name
        options = {"buckets": SECONDS}
        self._first = one(Histogram, "time_to_first_token_seconds", "From arrival to first token.", **options)
        self._seconds = one(Histogram, "e2e_request_latency_seconds", "From arrival to end.", **options)
        self._waits = one(Histogram, "request_queue_time_seconds", "From arrival to decoding.", **options)
        name, text = "request_time_per_output_token_seconds", "Mean time of the tokens after the first."
        self._token = one(Histogram, name, text, buckets=TOKEN_SECONDS)

    def ended(self, answer: Answer, reason: str, seconds: float) -> None:
        """Count an answer; `reason` is one of `REASONS`, `seconds` passed since it was requested."""
        usage = answer.usage
        self._ended[reason].inc()
        self._waits.observe(seconds if answer.waited is None else answer.waited)
        self._seconds.observe(seconds)
        if answer.first is None:
            return
        self._first.observe(answer.first)
        if usage.completion_tokens > 1:
            self._token.observe((seconds - answer.first) / (usage.completion_tokens - 1))
        self._prompt.inc(usage.prompt_tokens)
        self._tokens.inc(usage.completion_tokens)
        self._passes.inc(usage.passes)
        self._drafts.inc(usage.steps.total())
        self._drafted.inc(usage.drafted)
        self._accepted.inc(usage.accepted)
        for accepted, steps in usage.steps.items():
            for place in range(accepted):
                self._places.labels(self._model, str(place)).inc(steps)

    def logged(self, outcome: str) -> None:
        """Count an answer for the response log; `outcome` is one of `LOGGED`."""
        self._lines.labels(outcome).inc()

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

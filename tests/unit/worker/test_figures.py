"""The figures of the worker: of batches, and under vLLM's names."""

import threading

from draftstore.text.tokenizer import TextTokenizer
from services.worker.figures import WorkerMetrics
from tests.fakes.served import Samples
from tests.fakes.waiting import until
from tests.fakes.workers import MODEL, FakeEngine, running_worker

OURS, THEIRS = "draftstore_decoding_", "vllm:"
TWINS = {
    "running": "num_requests_running",
    "queue_depth": "num_requests_waiting",
    "prompt_tokens_total": "prompt_tokens_total",
    "completion_tokens_total": "generation_tokens_total",
    "drafts_total": "spec_decode_num_drafts_total",
    "drafted_tokens_total": "spec_decode_num_draft_tokens_total",
    "accepted_tokens_total": "spec_decode_num_accepted_tokens_total",
    "accepted_tokens_per_position_total": "spec_decode_num_accepted_tokens_per_pos_total",
    "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_bucket": "time_to_first_token_seconds_bucket",
    "seconds_per_token_sum": "request_time_per_output_token_seconds_sum",
    "queue_seconds_sum": "request_queue_time_seconds_sum",
    "request_seconds_sum": "e2e_request_latency_seconds_sum",
}


def values(samples: Samples, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the values of a metric by its labels, without the model's name."""
    return {
        tuple(pair for pair in labels if pair != ("model_name", MODEL)): value
        for (found, labels), value in samples.items()
        if found == name
    }


def test_vllms_names_say_the_same(small_tokenizer: TextTokenizer) -> None:
    with running_worker(FakeEngine(small_tokenizer, chunk=3)) as worker:
        for tokens in (8, 6):  # passes of 1, 3, 3, 1 and 1, 3, 2 tokens
            assert worker.ask("completions", prompt="a b", max_tokens=tokens, ignore_eos=True)[0] == 200
        samples = worker.samples()
    for ours, theirs in TWINS.items():
        found = values(samples, THEIRS + theirs)
        assert found, theirs
        assert found == values(samples, OURS + ours), theirs
    told = {name for name, _ in samples if name.startswith(THEIRS)}
    assert all(dict(labels)["model_name"] == MODEL for name, labels in samples if name in told)


def test_accepted_tokens_by_position(small_tokenizer: TextTokenizer) -> None:
    seven = small_tokenizer.encode("a b c d e f g", bos=False).tolist()[:7]
    with running_worker(FakeEngine(small_tokenizer, lambda _work: seven, chunk=3)) as worker:
        assert worker.ask("completions", prompt="a", max_tokens=6)[0] == 200
        samples = worker.samples()
    # After the first token passes of 3 and 2, each with one token that was not drafted: 2 of 2 and 1 of 1.
    assert values(samples, "vllm:spec_decode_num_drafts_total") == {(): 2}
    assert values(samples, "vllm:spec_decode_num_draft_tokens_total") == {(): 3}
    assert values(samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == {
        (("position", "0"),): 2,
        (("position", "1"),): 1,
    }


def test_nothing_has_vllms_names_before_the_model_is_known() -> None:
    assert b"vllm:" not in WorkerMetrics().text()


def test_figures_of_batches(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer, most=2)
    engine.gate = threading.Semaphore(0)
    with running_worker(engine) as worker:
        many = worker.begin(prompt="a", n=2, max_tokens=3)
        until(lambda: len(engine.works) == 2)
        engine.gate.release(100)
        assert many.getresponse().status == 200
        many.close()
        assert (worker.metric("batch_size_count"), worker.metric("batch_size_sum")) == (3, 6)
        assert (worker.metric("slots_filled_count"), worker.metric("slots_filled_sum")) == (3, 1.5)

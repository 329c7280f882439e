"""The metrics of the worker: under vLLM's names where vLLM has one, else under ours."""

from draftstore.text.tokenizer import TextTokenizer
from tests.fakes.workers import FakeEngine, running_worker

PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def test_figures_of_answers(small_tokenizer: TextTokenizer) -> None:
    seven = small_tokenizer.encode("a b c d e f g", bos=False).tolist()[:7]
    with running_worker(FakeEngine(small_tokenizer, lambda _work: seven, chunk=3)) as worker:
        assert worker.ask("completions", prompt="a", max_tokens=6)[0] == 200
        assert worker.ask("completions", prompt="a", max_tokens=1)[0] == 200
        assert worker.ask("completions", prompt="a", max_tokens=-2)[0] == 400
        # After the first token passes of 3 and 2, each with one token that was not drafted: 2 of 2 and 1 of 1.
        for name, expected in {
            "vllm:prompt_tokens_total": 4,
            "vllm:generation_tokens_total": 7,
            "vllm:spec_decode_num_drafts_total": 2,
            "vllm:spec_decode_num_draft_tokens_total": 3,
            "vllm:spec_decode_num_accepted_tokens_total": 3,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:request_queue_time_seconds_count": 2,
            "vllm:request_time_per_output_token_seconds_count": 1,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "passes_total": 2,
            "requests_refused_total": 1,
            "ready": 1,
        }.items():
            assert worker.metric(name) == expected, name
        assert [worker.metric(PER_POSITION, position=place) for place in "01"] == [2, 1]
        assert worker.ended() == {"length": 2}
        assert not any(value == "" for _, labels in worker.samples() for _, value in labels)

"""Generation with drafts does whatever plain `generate` does with a request; also, requests that are refused.

Each test runs both and compares texts, scores, and what criteria, processors and streamers saw. Unless stated
otherwise, the drafter is a prophet whose accepted paths are off the first branch.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from draftstore.decoding.loop import Step, Tally
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError, DraftTreeError, ProbabilityError
from draftstore.hf import generate, speculative_generate
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import OverBudget, Prophet, Silent
from tests.fakes.hf_models import build, stories, stories_tokenizer, story_ids, tiny

VOCAB = 40
PROMPT = torch.tensor([[1, 2, 3, 4]])
SIZE = 4


def model_() -> Any:
    """Return a random model; greedily, it says 13 different tokens behind the prompt, and then mixes some."""
    return tiny(vocab_size=VOCAB, seed=1)


def ids_of(output: Any) -> list[int]:
    return (output if isinstance(output, torch.Tensor) else output.sequences)[0].tolist()


def plain(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    return model.generate(ids, **({"do_sample": False} | options))


def prophet(model: Any, *texts: Sequence[int], error_rate: float = 0.0) -> Prophet:
    """Return a prophet of some texts, which it believes to go on behind their end."""
    return Prophet(model.config.vocab_size, [[*text, *range(8)] for text in texts], error_rate)


def both(
    model: Any, ids: torch.Tensor = PROMPT, error_rate: float = 0.0, **options: Any
) -> tuple[Any, Any, Tally]:
    """Generate plainly and with drafts: both outputs, and the totals of the latter."""
    expected, tally = plain(model, ids, **options), Tally()
    drafter = prophet(model, ids_of(expected), error_rate=error_rate)
    found = generate(model, ids, drafter=drafter, on_step=tally.add, **({"do_sample": False} | options))
    return expected, found, tally


# --- where texts end ---


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 13},
        {"max_length": 12, "min_length": 9},
        {"max_new_tokens": 20, "max_time": 0.0},
        {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)])},
    ],
)
def test_limits_of_a_text(options: dict[str, Any]) -> None:
    expected, found, _ = both(model_(), **options)
    assert ids_of(found) == ids_of(expected)
    assert len(ids_of(found)) == options.get("max_length", SIZE + 1)


def test_drafts_end_with_the_text_and_with_the_positions() -> None:
    """GPT-2 has an embedding for each of its positions and none beyond."""
    model = tiny("gpt2", vocab_size=VOCAB, max_position_embeddings=24)
    left, expected = [20], plain(model, max_new_tokens=20)

    def check(step: Step) -> None:
        assert int(step.tree.depths.max(initial=0)) <= max(0, left[0] - 1)
        left[0] -= len(step.tokens)

    drafter = prophet(model, ids_of(expected), error_rate=0.1)
    found = generate(model, PROMPT, drafter=drafter, max_new_tokens=20, do_sample=False, on_step=check)
    assert ids_of(found) == ids_of(expected)
    assert left == [0]
    assert drafter.moved > 0


@pytest.mark.parametrize("budget", [0, 1, 5, 500])
def test_budget_and_pass_rows_bound_the_verified_nodes(budget: int) -> None:
    steps: list[Step] = []
    options: dict[str, Any] = {"budget": budget, "max_new_tokens": 30, "on_step": steps.append}
    generate(model_(), PROMPT, drafter=OverBudget(VOCAB), do_sample=False, **options)
    most = max(len(step.tree) for step in steps)
    assert most == budget or 64 < most <= 127 < budget


@pytest.mark.parametrize("place", [0, 1, 5, 6, 7])
def test_an_end_inside_an_accepted_block(place: int) -> None:
    """The token that ends the text stands at many places of a block in turn; the drafter goes on behind it."""
    model = model_()
    text = ids_of(plain(model, max_new_tokens=30))
    options: dict[str, Any] = {"eos_token_id": [text[SIZE + place], VOCAB - 1], "pad_token_id": 0}
    drafter = prophet(model, text)
    found = generate(model, PROMPT, drafter=drafter, max_new_tokens=30, do_sample=False, **options)
    assert ids_of(found) == text[: SIZE + place + 1]
    assert drafter.text == (ids_of(found) if place else []), (
        "it knows the whole text, and nothing behind its end"
    )


@pytest.mark.parametrize("stop", [" a", ["nothing like it", "day, s"]])
@pytest.mark.parametrize("configured", [False, True])
def test_stop_strings(data: Path, stop: Any, configured: bool) -> None:
    model, tokenizer, ids = stories(data), stories_tokenizer(data), story_ids(data)
    config: Any = GenerationConfig(max_new_tokens=80, stop_strings=stop if configured else None)  # type: ignore[no-untyped-call]
    given = {} if configured else {"stop_strings": stop}
    expected, found, tally = both(model, ids, generation_config=config, tokenizer=tokenizer, **given)
    assert ids_of(found) == ids_of(expected)
    assert len(ids_of(found)) == len(ids[0]) + tally.tokens < len(ids[0]) + 80
    assert config.stop_strings == (stop if configured else None), "it belongs to the caller"


# --- what processors, criteria and streamers see, and what is returned ---

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "suppressed": {"suppress_tokens": list(range(0, VOCAB, 2)), "begin_suppress_tokens": [1, 3, 5, 7]},
    "least tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, VOCAB, 2)), "pad_token_id": 0},
    "length penalty": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 7, "pad_token_id": 0},
    "guidance": {"guidance_scale": 1.5},
    "allowed tokens": {
        "prefix_allowed_tokens_fn": lambda _batch, ids: [
            (int(ids[-1]) * 7 + step) % VOCAB for step in range(9)
        ]
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_applied_each_at_its_own_prefix(name: str) -> None:
    model, options = model_(), {"max_new_tokens": 30} | PROCESSORS[name]
    expected, found, tally = both(model, error_rate=0.4, **options)
    assert ids_of(found) == ids_of(expected)
    assert ids_of(expected) != ids_of(plain(model, max_new_tokens=30)), "the processor matters"
    assert tally.accepted_length > 1.5


class Watching(StoppingCriteria):
    """Ends a text at a length, and notes all that it is shown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[tuple[list[int], int | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return torch.full((1,), input_ids.shape[1] >= self.length)


class Counting(LogitsProcessor):
    """A processor with a memory: it forbids what it has seen forbidden least, and notes its calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        scores[:, len(self.calls) % 7 :: 7] = -torch.inf  # in place, as some do
        return scores


class Recording(BaseStreamer):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "greedy": (model_, {}),
    "sampled": (model_, {"do_sample": True, "top_k": 7}),
    "eager": (lambda: tiny("qwen2", vocab_size=VOCAB, seed=1, attention="eager"), {}),
    "window": (lambda: tiny("mistral", vocab_size=VOCAB, seed=1, sliding_window=6), {}),
    "padding": (model_, {"attention_mask": torch.tensor([[0, 0, 1, 1]])}),
}


def everything(run: Callable[..., Any], **options: Any) -> tuple[Any, list[Any]]:
    """Generate with all kinds of company: the output, and what the company saw."""
    watching, counting, recording = Watching(SIZE + 26), Counting(), Recording()
    torch.manual_seed(1)
    output = run(
        PROMPT,
        max_new_tokens=30,
        stopping_criteria=StoppingCriteriaList([watching]),
        logits_processor=LogitsProcessorList([counting]),
        repetition_penalty=1.2,
        streamer=recording,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **({"do_sample": False} | options),
    )
    return output, [watching.seen, counting.calls, recording.calls]


@pytest.mark.parametrize("kind", KINDS)
def test_criteria_processors_and_streamers_see_the_same_as_plainly(kind: str) -> None:
    """Each once for every token in order, although many rows are computed at a time; and the same is returned."""
    make, options = KINDS[kind]
    model = make()
    expected, expected_log = everything(model.generate, **options)
    known = ids_of(expected)[2:] if kind == "padding" else ids_of(expected)
    drafter = prophet(model, known, error_rate=0.4)
    found, log = everything(functools.partial(generate, model, drafter=drafter), **options)
    assert ids_of(found) == ids_of(expected)
    assert log == expected_log
    assert [len(calls) for calls in log] == [26, 26, 28]
    assert type(found) is type(expected)
    assert set(expected.keys()) - set(found.keys()) == {"past_key_values"}
    for name in ("scores", "logits"):
        for row, true in zip(found[name], expected[name], strict=True):
            assert row.dtype == true.dtype
            torch.testing.assert_close(row, true, rtol=1e-4, atol=1e-5)
    assert drafter.trees <= 20, "drafts were accepted"


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 2},
        {"position_ids": torch.arange(SIZE)[None]},
        {"cache_implementation": "static"},
        {"past_key_values": DynamicCache()},
        {"output_hidden_states": True, "output_router_logits": False},
    ],
)
def test_other_arguments_of_generate_change_nothing(options: dict[str, Any]) -> None:
    model = model_()
    text = ids_of(plain(model, max_new_tokens=20))
    drafter = prophet(model, text, error_rate=0.2)
    assert (
        ids_of(generate(model, PROMPT, drafter=drafter, max_new_tokens=20, do_sample=False, **options))
        == text
    )


def test_as_custom_generate() -> None:
    model, tally = model_(), Tally()
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=1.2)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"generation_config": config, "custom_generate": speculative_generate}
    expected = model.generate(PROMPT, generation_config=config)
    drafter = prophet(model, ids_of(expected))
    found = model.generate(PROMPT, drafter=drafter, budget=30, on_step=tally.add, **options)
    assert ids_of(found) == ids_of(expected) == ids_of(model.generate(PROMPT, **options))
    assert tally.accepted_length > 4


def test_a_streamer_and_a_tokenizer_reach_the_custom_function(data: Path) -> None:
    """Partial or not; transformers alone drops both."""
    model: Any = stories(data)
    tokenizer, ids = stories_tokenizer(data), story_ids(data)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
    options |= {"stop_strings": ["park"], "tokenizer": tokenizer}
    seen = []
    for custom in (None, speculative_generate, functools.partial(speculative_generate, budget=9)):
        streamer = Recording()
        given = {} if custom is None else {"custom_generate": custom, "drafter": RequestDrafter(512)}
        output = model.generate(ids, streamer=streamer, **options, **given)
        seen.append((output.tolist(), streamer.calls))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1][-1] == "end"


# --- steps and errors ---


def test_steps_report_all_tokens_after_each_pass() -> None:
    model, streamer, steps, counts = model_(), Recording(), list[Step](), list[int]()
    text, threads = ids_of(plain(model, max_new_tokens=20)), set()

    def on_step(step: Step) -> None:
        steps.append(step)
        counts.append(len(streamer.calls))
        threads.add(threading.get_ident())

    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "streamer": streamer}
    generate(model, PROMPT, drafter=prophet(model, text), on_step=on_step, **options)
    assert [token for step in steps for token in step.tokens.tolist()] == text[SIZE:]
    assert (len(steps[0].tree), steps[0].path, len(steps[0].tokens)) == (0, [], 1)
    assert steps[0].forward_ns > 0
    assert counts == [2, 9, 16, 21]  # prompt and first token, then 7 tokens a pass, and 5
    assert threads == {threading.get_ident()}


def test_an_exception_of_on_step_ends_generation() -> None:
    steps: list[Step] = []

    def enough(step: Step) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise ZeroDivisionError

    drafter = prophet(model_(), ids_of(plain(model_(), max_new_tokens=40)))
    with pytest.raises(ZeroDivisionError):
        generate(model_(), PROMPT, drafter=drafter, max_new_tokens=40, do_sample=False, on_step=enough)
    assert sum(len(step.tokens) for step in steps) == 15


class Extreme(LogitsProcessor):
    """Scores that no probabilities come of."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, torch.inf)


def test_settings_without_finite_probabilities_are_refused() -> None:
    options: Any = {"do_sample": True, "max_new_tokens": 2, "drafter": RequestDrafter(VOCAB)}
    model = build(vocab_size=VOCAB)
    with pytest.raises(ProbabilityError, match="milder penalties"):
        generate(model, PROMPT, logits_processor=LogitsProcessorList([Extreme()]), **options)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(DecodingError, match="another dtype"):
        generate(model, PROMPT, **options)


@pytest.mark.parametrize(
    ("tokens", "parents", "error", "words"),
    [
        ([3, VOCAB], [-1, 0], DecodingError, f"proposes token {VOCAB}, expected an id .* below {VOCAB}"),
        ([3, -1], [-1, 0], DraftTreeError, "token -1"),
        ([3, 3], [1, -1], DraftTreeError, "node"),
    ],
)
def test_a_wrong_tree_is_refused(
    tokens: list[int], parents: list[int], error: type[Exception], words: str
) -> None:
    class Wrong(Silent):
        def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
            return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int16), np.zeros(2, np.uint8))

    with pytest.raises(error, match=words):
        generate(model_(), PROMPT, drafter=Wrong(VOCAB), max_new_tokens=9, do_sample=False)


# --- requests that are refused ---

SCORES = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        (1, {"num_beams": 2}, "num_beams is 2, expected 1"),
        (1, {"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search, expected greedy search or sampling"),
        (1, {"prompt_lookup_num_tokens": 3}, "select assisted_generation"),
        (1, {"assistant_model": tiny()}, "assistant_model with drafts is not supported: remove it"),
        (1, {"return_dict_in_generate": True, "output_attentions": True}, "output_attentions with drafts"),
        (1, {"return_dict_in_generate": True, "output_hidden_states": True}, "^output_hidden_states with drafts"),
        (1, {"inputs_embeds": torch.zeros((1, SIZE, 32), dtype=torch.float64)}, "inputs_embeds with drafts"),
        (1, {"position_ids": torch.arange(SIZE)[None] + 1}, "position_ids are not the default"),
        (1, {"position_ids": torch.zeros((3, 1, SIZE), dtype=torch.int64)}, "position_ids are not the default"),
        (2, {"streamer": Recording()}, "streamer for several texts"),
        (2, SCORES, "output_scores with drafts"),
        (2, {"prefix_allowed_tokens_fn": lambda row, ids: [9 + row]}, "PrefixConstrainedLogitsProcessor"),
        (2, {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        (2, {"seeds": [1]}, "1 seeds for 2 texts"),
        (2, {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}, "pad on the left"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(texts: int, options: dict[str, Any], words: str) -> None:
    prompts = PROMPT.expand(texts, -1)
    with pytest.raises(DecodingError, match=words):
        generate(tiny(attention="eager"), prompts, drafter=Silent(64), max_new_tokens=4, **options)


def test_a_cache_that_holds_a_text_is_refused() -> None:
    model = model_()
    options: dict[str, Any] = {"custom_generate": speculative_generate, "max_new_tokens": 4}
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=60)):
        expected = plain(model, max_new_tokens=4)
        assert torch.equal(model.generate(PROMPT, past_key_values=cache, **options), expected)
        model(PROMPT[:, :2], past_key_values=cache)
        with pytest.raises(DecodingError, match="past_key_values already holds a text"):
            model.generate(PROMPT, past_key_values=cache, **options)

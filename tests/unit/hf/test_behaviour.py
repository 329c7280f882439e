"""Whatever plain `generate` does with a request, generation with drafts does too.

Each test runs both and compares: texts, scores, and what criteria, processors and streamers saw. The drafter is a
prophet whose accepted paths lie off the first branch, unless said otherwise.
"""

import functools
import io
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from draftstore.decoding.loop import Step, Tally
from draftstore.errors import DecodingError, DraftTreeError
from draftstore.hf import generate, speculative_generate
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import (
    Adversary,
    AlwaysWrong,
    EosInside,
    Knowing,
    OverBudget,
    Prophet,
    RandomTrees,
    Silent,
)
from tests.fakes.hf_models import stories, stories_tokenizer, story_ids, tiny

VOCAB = 40
PROMPT = torch.tensor([[1, 2, 3, 4]])


def model_() -> Any:
    """Return a random model; greedily, it says 13 different tokens behind the prompt, and then mixes some."""
    return tiny(vocab_size=VOCAB, seed=1)


def ids_of(output: Any) -> list[int]:
    return (output if isinstance(output, torch.Tensor) else output.sequences)[0].tolist()


def plain(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    return model.generate(ids, **({"do_sample": False} | options))


def prophet(model: Any, *texts: Sequence[int], error_rate: float = 0.0, depth: int = 6) -> Prophet:
    """Return a prophet of some texts, which it believes to go on behind their end."""
    return Prophet(model.config.vocab_size, [[*text, *range(8)] for text in texts], error_rate, depth)


def both(
    model: Any, ids: torch.Tensor = PROMPT, drafter: Adversary | None = None, **options: Any
) -> tuple[Any, Any, Tally]:
    """Generate plainly and with drafts: both outputs, and the totals of the latter."""
    expected = plain(model, ids, **options)
    tally = Tally()
    found = generate(
        model,
        ids,
        drafter=drafter or prophet(model, ids_of(expected)),
        on_step=tally.add,
        **({"do_sample": False} | options),
    )
    return expected, found, tally


# --- adversaries ---

DRAFTERS: dict[str, Callable[[int, list[int], int], Adversary]] = {
    "silent": lambda vocab_size, truth, eos: Silent(vocab_size),
    "random": lambda vocab_size, truth, eos: RandomTrees(vocab_size),
    "over budget": lambda vocab_size, truth, eos: OverBudget(vocab_size),
    "always wrong": lambda vocab_size, truth, eos: AlwaysWrong(vocab_size, [truth]),
    "ends inside": lambda vocab_size, truth, eos: EosInside(vocab_size, [truth], eos),
    "half a prophet": lambda vocab_size, truth, eos: Prophet(vocab_size, [truth], error_rate=0.5),
    "prophet": lambda vocab_size, truth, eos: Prophet(vocab_size, [truth]),
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_changes_the_text_of_a_random_model(name: str, seed: int) -> None:
    """Random models say unlikely things: their texts do not repeat what a wrong cache could say as well."""
    model = tiny(vocab_size=VOCAB, seed=seed)
    expected = ids_of(plain(model, max_new_tokens=40))
    drafter = DRAFTERS[name](VOCAB, expected, expected[-1])
    found = generate(model, PROMPT, drafter=drafter, budget=24, max_new_tokens=40, do_sample=False)
    assert ids_of(found) == expected
    if name == "prophet":
        assert drafter.moved >= 5


def test_the_prophets_of_these_tests_are_believed() -> None:
    """That is: their rows are moved in the cache nearly always, so a cache in disorder would show."""
    _, _, tally = both(model_(), max_new_tokens=43)
    assert (tally.passes, tally.tokens) == (7, 43)  # the prefill, and six passes of 7 tokens


# --- where texts end ---


@pytest.mark.parametrize("count", range(1, 12))
def test_max_new_tokens(count: int) -> None:
    expected, found, tally = both(model_(), max_new_tokens=count)
    assert ids_of(found) == ids_of(expected)
    assert len(ids_of(found)) == len(PROMPT[0]) + count == len(PROMPT[0]) + tally.tokens


def test_nothing_is_verified_that_could_not_be_said_any_more() -> None:
    """A node behind the last place of the text costs time for nothing."""
    model, left = model_(), 20
    steps: list[Step] = []
    drafter = prophet(model, ids_of(plain(model, max_new_tokens=30)))
    generate(model, PROMPT, drafter=drafter, max_new_tokens=left, do_sample=False, on_step=steps.append)
    assert len(steps) == 4
    for step in steps:
        assert max(step.tree.depths, default=0) < left
        left -= len(step.tokens)
    assert len(steps[-1].tree) > 0


@pytest.mark.parametrize("options", [{"max_length": 13}, {"max_length": 12, "min_length": 9}])
def test_lengths(options: dict[str, Any]) -> None:
    expected, found, _ = both(model_(), **options)
    assert ids_of(found) == ids_of(expected)
    assert len(ids_of(found)) == options["max_length"]


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("drafting", ["prophet", "ends inside"])
def test_an_end_inside_an_accepted_block(place: int, drafting: str) -> None:
    """The token that ends the text stands at every place of the block in turn; the drafter goes on behind it."""
    model = model_()
    text = ids_of(plain(model, max_new_tokens=30))
    eos = text[len(PROMPT[0]) + place]
    drafter = prophet(model, text) if drafting == "prophet" else EosInside(VOCAB, [text], eos)
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": [eos, VOCAB - 1], "pad_token_id": 0}
    expected, found, _ = both(model, drafter=drafter, **options)
    assert ids_of(found) == ids_of(expected)
    assert ids_of(found)[-1] == eos
    assert drafter.text == (ids_of(found) if place else []), (
        "the drafter knows the whole text, and nothing behind its end"
    )


@pytest.mark.parametrize("least", [0, 3, 9, 20])
def test_min_new_tokens(least: int) -> None:
    model = model_()
    eos = ids_of(plain(model, max_new_tokens=9))[len(PROMPT[0]) + 2]
    expected, found, _ = both(
        model, max_new_tokens=20, min_new_tokens=least, eos_token_id=eos, pad_token_id=0
    )
    assert ids_of(found) == ids_of(expected)
    assert len(ids_of(found)) >= len(PROMPT[0]) + max(least, 3)


@pytest.mark.parametrize("stop", [" a", "was", ["nothing like it", "day, s"], ".", ["e"], "named Lily"])
def test_stop_strings(data: Path, stop: Any) -> None:
    model, tokenizer, ids = stories(data), stories_tokenizer(data), story_ids(data)
    expected, found, tally = both(model, ids, max_new_tokens=80, stop_strings=stop, tokenizer=tokenizer)
    assert ids_of(found) == ids_of(expected)
    assert len(ids_of(found)) < len(ids[0]) + 80, "the string does come"
    assert tally.tokens == len(ids_of(found)) - len(ids[0])


def test_stop_strings_of_a_configuration(data: Path) -> None:
    model, tokenizer, ids = stories(data), stories_tokenizer(data), story_ids(data)
    config: Any = GenerationConfig(max_new_tokens=60, stop_strings=["day, s"])  # type: ignore[no-untyped-call]
    generate_plainly: Any = model.generate
    expected = generate_plainly(ids, generation_config=config, tokenizer=tokenizer)
    drafter = prophet(model, ids_of(expected))
    found = generate(model, ids, drafter=drafter, generation_config=config, tokenizer=tokenizer)
    assert ids_of(found) == ids_of(expected)
    assert len(ids_of(found)) < len(ids[0]) + 60
    assert config.stop_strings == ["day, s"], "it belongs to the caller"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        generate(model_(), PROMPT, max_new_tokens=5, stop_strings="x")


class Watching(StoppingCriteria):
    """Ends a text at a length, and notes all that it is shown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[tuple[list[int], int | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return torch.full((1,), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("scores", [False, True])
def test_a_criterion_of_ones_own_sees_what_it_sees_plainly(scores: bool) -> None:
    model, seen = model_(), []
    text = ids_of(plain(model, max_new_tokens=30))
    for run in (
        plain,
        lambda model, **options: generate(model, PROMPT, drafter=prophet(model, text), **options),
    ):
        watching = Watching(len(PROMPT[0]) + 11)
        output = run(
            model,
            max_new_tokens=30,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([watching]),
            return_dict_in_generate=True,
            output_scores=scores,
        )
        assert len(ids_of(output)) == len(PROMPT[0]) + 11
        seen.append(watching.seen)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 11


def test_a_criterion_may_keep_what_it_was_shown() -> None:
    model, kept = model_(), []

    class Keeping(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            kept.append(input_ids)
            return torch.full((1,), False)

    _, found, _ = both(model, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([Keeping()]))
    expected = [ids_of(found)[:size] for size in range(5, 25)]
    assert [ids[0].tolist() for ids in kept] == expected * 2


def test_time_that_has_run_out_ends_the_text() -> None:
    for criteria in ({"max_time": 0.0}, {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)])}):
        expected, found, _ = both(model_(), max_new_tokens=20, **criteria)
        assert len(ids_of(found)) == len(ids_of(expected)) == len(PROMPT[0]) + 1


# --- logits processors ---

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "no token twice": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[1], [2], [3], [5, 17], [20], [21], [22], [23]]},
    "suppressed": {"suppress_tokens": list(range(0, VOCAB, 2)), "begin_suppress_tokens": [1, 3, 5, 7]},
    "forced end": {"forced_eos_token_id": 9, "eos_token_id": 39, "pad_token_id": 0},
    "length penalty": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 7, "pad_token_id": 0},
    "bias": {"sequence_bias": [[[5], 3.0], [[7, 8], 4.0], [[1, 2, 3], -9.0]]},
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.5}},
    "allowed tokens": {
        "prefix_allowed_tokens_fn": lambda _batch, ids: [
            (int(ids[-1]) * 7 + step) % VOCAB for step in range(9)
        ]
    },
}


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_applied_each_at_its_own_prefix(name: str, error_rate: float) -> None:
    model, options = model_(), {"max_new_tokens": 30} | PROCESSORS[name]
    expected = ids_of(plain(model, **options))
    assert expected != ids_of(plain(model, max_new_tokens=30)), "the processor matters"
    drafter = prophet(model, expected, error_rate=error_rate)
    _, found, tally = both(model, drafter=drafter, **options)
    assert ids_of(found) == expected
    assert tally.accepted_length > 1.5


class Counting(LogitsProcessor):
    """A processor with a memory: it forbids what it has seen forbidden least, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        scores[:, len(self.calls) % 7 :: 7] = -torch.inf  # in place, as some do
        return scores


def test_a_processor_with_a_memory_is_called_once_for_each_token_in_order() -> None:
    """So it works as in plain generate, although many rows are computed at a time."""
    model, one, other = model_(), Counting(), Counting()
    expected = plain(model, max_new_tokens=25, logits_processor=LogitsProcessorList([one]))
    found = generate(
        model,
        PROMPT,
        drafter=prophet(model, ids_of(expected)),
        max_new_tokens=25,
        do_sample=False,
        logits_processor=LogitsProcessorList([other]),
    )
    assert ids_of(found) == ids_of(expected)
    assert one.calls == other.calls


# --- what is returned ---


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}, {"do_sample": True, "top_k": 7}])
def test_scores_and_logits_are_those_of_plain_generate(options: dict[str, Any]) -> None:
    model = model_()
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    } | options
    torch.manual_seed(1)
    expected = plain(model, **options)
    torch.manual_seed(1)
    found: Any = generate(model, PROMPT, drafter=prophet(model, ids_of(expected)), **options)
    assert type(found) is type(expected)
    assert set(expected.keys()) - set(found.keys()) == {"past_key_values"}
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        mine, theirs = found[name], expected[name]
        assert len(mine) == len(theirs) == 20
        for row, true in zip(mine, theirs, strict=True):
            assert (row.shape, row.dtype) == (true.shape, true.dtype)
            torch.testing.assert_close(row, true, rtol=1e-5, atol=1e-6)


def test_scores_that_were_not_asked_for_are_none() -> None:
    expected, found, _ = both(model_(), max_new_tokens=9, return_dict_in_generate=True)
    for name in ("scores", "logits", "attentions", "hidden_states"):
        assert getattr(found, name) is None
        assert getattr(expected, name) is None


def test_without_a_dict_a_tensor_of_the_same_type_is_returned() -> None:
    expected, found, _ = both(model_(), max_new_tokens=9, output_scores=True)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device)
    found[0, 0] = 9
    assert PROMPT[0, 0] == 1, "the prompt is not the output"


def test_a_prompt_of_shorter_integers_gives_what_plain_generate_gives() -> None:
    ids = PROMPT.int()
    expected = plain(model_(), ids, max_new_tokens=9)
    for drafter in (None, prophet(model_(), expected[0].tolist())):
        found = generate(model_(), ids, drafter=drafter, do_sample=False, max_new_tokens=9)
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "eager": (lambda: tiny("qwen2", vocab_size=VOCAB, seed=1, attention="eager"), {}),
    "window": (lambda: tiny("mistral", vocab_size=VOCAB, seed=1, sliding_window=6), {}),
    "padding": (model_, {"attention_mask": torch.tensor([[0, 0, 1, 1]])}),
}


def everything(run: Callable[..., Any], **options: Any) -> tuple[Any, list[Any]]:
    """Generate with all kinds of company: the output, and what the company saw."""
    watching, counting, recording = Watching(len(PROMPT[0]) + 26), Counting(), Recording()
    output = run(
        PROMPT,
        max_new_tokens=30,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([watching]),
        logits_processor=LogitsProcessorList([counting]),
        repetition_penalty=1.2,
        streamer=recording,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return output, [watching.seen, counting.calls, recording.calls]


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_holds_for_every_kind_of_pass(kind: str, error_rate: float) -> None:
    make, options = KINDS[kind]
    model = make()
    expected, expected_log = everything(model.generate, **options)
    known = ids_of(expected)[2:] if kind == "padding" else ids_of(expected)
    drafter = prophet(model, known, error_rate=error_rate)
    found, log = everything(functools.partial(generate, model, drafter=drafter), **options)
    assert ids_of(found) == ids_of(expected)
    assert log == expected_log
    assert [len(calls) for calls in log] == [26, 26, 28]
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
    assert drafter.trees <= (5 if error_rate == 0.0 else 20), "drafts were accepted"


# --- streamers ---


class Recording(BaseStreamer):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("count", [1, 2, 20])
def test_a_streamer_gets_the_calls_that_it_gets_plainly(count: int) -> None:
    model, one, other = model_(), Recording(), Recording()
    expected = plain(model, max_new_tokens=count, streamer=one)
    output = generate(
        model,
        PROMPT,
        drafter=prophet(model, ids_of(expected)),
        max_new_tokens=count,
        do_sample=False,
        streamer=other,
    )
    assert ids_of(output) == ids_of(expected)
    assert other.calls == one.calls
    assert len(other.calls) == count + 2


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_text_streamer_prints_what_it_prints_plainly(data: Path, skip_prompt: bool) -> None:
    model, tokenizer, ids = stories(data), stories_tokenizer(data), story_ids(data)
    printed = []
    text = ids_of(plain(model, ids, max_new_tokens=50))
    for drafter in (None, prophet(model, text)):
        with redirect_stdout(io.StringIO()) as out:
            streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
            if drafter is None:
                plain(model, ids, max_new_tokens=50, streamer=streamer)
            else:
                generate(model, ids, drafter=drafter, max_new_tokens=50, do_sample=False, streamer=streamer)
        printed.append(out.getvalue())
    assert printed[0] == printed[1]
    assert ("Once" in printed[1]) != skip_prompt


def test_a_streamer_of_pieces_is_read_while_the_text_is_written(data: Path) -> None:
    model, tokenizer, ids = stories(data), stories_tokenizer(data), story_ids(data)
    text = ids_of(plain(model, ids, max_new_tokens=50))
    pieces = []
    with_drafts = functools.partial(generate, model, drafter=prophet(model, text))
    run: Callable[..., Any]
    for run in (functools.partial(plain, model), with_drafts):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        options = {"streamer": streamer, "max_new_tokens": 50, "do_sample": False}
        thread = threading.Thread(target=run, args=(ids,), kwargs=options)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1]
    assert "".join(pieces[1]) in tokenizer.decode(text)


def test_tokens_are_streamed_as_soon_as_their_pass_is_made() -> None:
    model, streamer = model_(), Recording()
    counts: list[int] = []
    text = ids_of(plain(model, max_new_tokens=20))
    generate(
        model,
        PROMPT,
        drafter=prophet(model, text),
        max_new_tokens=20,
        do_sample=False,
        streamer=streamer,
        on_step=lambda step: counts.append(len(streamer.calls)),
    )
    assert counts == [2, 9, 16, 21]  # prompt and first token, then 7 tokens a pass, and 5


# --- steps ---


def test_steps_tell_the_whole_text() -> None:
    model, steps = model_(), list[Step]()
    text = ids_of(plain(model, max_new_tokens=30))
    thread = set()

    def on_step(step: Step) -> None:
        steps.append(step)
        thread.add(threading.get_ident())

    generate(model, PROMPT, drafter=prophet(model, text), max_new_tokens=30, do_sample=False, on_step=on_step)
    assert [token for step in steps for token in step.tokens.tolist()] == text[len(PROMPT[0]) :]
    assert (len(steps[0].tree), steps[0].path, len(steps[0].tokens)) == (0, [], 1)
    assert steps[0].forward_ns > 0
    assert thread == {threading.get_ident()}


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_an_exception_of_on_step_ends_generation(passes: int) -> None:
    model, steps = model_(), list[Step]()
    text = ids_of(plain(model, max_new_tokens=40))

    class EnoughError(Exception):
        pass

    def on_step(step: Step) -> None:
        steps.append(step)
        if len(steps) == passes:
            raise EnoughError

    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "on_step": on_step}
    with pytest.raises(EnoughError):
        generate(model, PROMPT, drafter=prophet(model, text), **options)
    assert sum(len(step.tokens) for step in steps) == 1 + 7 * (passes - 1)


# --- the drafter ---


class Curious(Knowing):
    """A prophet in a chain that wants to be told everything, and checks it against a pass without a cache."""

    needs_candidates = True
    needs_hidden = True

    def __init__(self, model: Any, text: Sequence[int]) -> None:
        super().__init__(model.config.vocab_size, [text])
        self.model = model
        self.passes = 0

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> Adversary:
        super().session(prompt_ids)
        prompt, empty = self.text[:-1], DraftTree.empty()
        assert len(prefill["candidates"]) == len(prompt), "its other rows: `test_prompts`"
        self.check(prompt, empty, prefill["candidates"][-1:], prefill["hidden"], prompt)
        return self

    def paths(self, budget: int) -> list[tuple[int, ...]]:
        truth = self.ahead(3)
        return [(self.other_than(truth[0]), *truth), truth] if truth else []

    def observe(self, accepted_ids: ArrayLike, **told: Any) -> None:
        before = list(self.text)
        super().observe(accepted_ids, **told)
        self.check(before, told["tree"], told["candidates"], told["hidden"], self.text[:-1])

    @torch.no_grad()
    def check(self, text: list[int], tree: DraftTree, candidates: Any, hidden: Any, last: list[int]) -> None:
        self.passes += 1
        assert (candidates.shape, candidates.dtype) == ((len(tree) + 1, 8), np.int32)
        for row in range(len(tree) + 1):
            path = tree.tokens[tree.path(row - 1)].tolist() if row else []
            scores = self.model(torch.tensor([[*text, *path]])).logits[0, -1]
            assert candidates[row].tolist() == scores.topk(8).indices.tolist()
        states = self.model.base_model(torch.tensor([last])).last_hidden_state[0, -1]
        assert (hidden.shape, hidden.dtype) == (states.shape, np.float16)
        np.testing.assert_allclose(hidden, states.float().numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 12}])
def test_drafters_are_told_the_candidates_of_every_row_and_the_hidden_state_of_the_last(
    options: dict[str, Any],
) -> None:
    """Raw logits decide the candidates, whatever processors and draws decide the text."""
    model = model_()
    options = {"max_new_tokens": 22, "do_sample": False} | options
    torch.manual_seed(3)
    expected = plain(model, **options)
    drafter = Curious(model, ids_of(expected))
    torch.manual_seed(3)
    assert ids_of(generate(model, PROMPT, drafter=drafter, **options)) == ids_of(expected)
    assert 7 <= drafter.passes <= 9


@pytest.mark.parametrize("token", [VOCAB, 2**31 - 1, -1])
def test_a_token_that_the_model_does_not_know_is_refused(token: int) -> None:
    class Foreign(Silent):
        def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
            return DraftTree(
                np.array([3, token], np.int32), np.array([-1, 0], np.int16), np.zeros(2, np.uint8)
            )

    with pytest.raises(DecodingError, match=f"proposes token {token}, expected an id .* below {VOCAB}"):
        generate(model_(), PROMPT, drafter=Foreign(VOCAB), max_new_tokens=9, do_sample=False)


@pytest.mark.parametrize("parents", [[-1, -1], [1, -1], [-1, 1], [-1, -7], [5, 0]])
def test_a_broken_tree_is_refused(parents: list[int]) -> None:
    class Broken(Silent):
        def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
            return DraftTree(np.array([3, 3], np.int32), np.array(parents, np.int16), np.zeros(2, np.uint8))

    with pytest.raises(DraftTreeError, match="node"):
        generate(model_(), PROMPT, drafter=Broken(VOCAB), max_new_tokens=9, do_sample=False)


@pytest.mark.parametrize("where", ["propose", "observe", "processor", "criterion", "streamer"])
def test_an_exception_in_the_middle_ends_generation_and_spoils_nothing(where: str) -> None:
    model = model_()
    text = ids_of(plain(model, max_new_tokens=40))
    drafter = prophet(model, text)
    calls = itertools.count(1)

    def fail(original: Callable[..., Any], at: int) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= at:
                raise ZeroDivisionError
            return original(*args, **kwargs)

        return failing

    class Failing(LogitsProcessor, StoppingCriteria, BaseStreamer):
        __call__ = put = fail(
            lambda *args, **_: args[-1] if where == "processor" else torch.tensor([False]), 12
        )

        def end(self) -> None:
            raise AssertionError

    options: dict[str, dict[str, Any]] = {
        "processor": {"logits_processor": LogitsProcessorList([Failing()])},
        "criterion": {"stopping_criteria": StoppingCriteriaList([Failing()])},
        "streamer": {"streamer": Failing()},
    }
    if where in ("propose", "observe"):
        setattr(drafter, where, fail(getattr(drafter, where), 2))
    given: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    with pytest.raises(ZeroDivisionError):
        generate(model, PROMPT, drafter=drafter, **given, **options.get(where, {}))
    assert ids_of(generate(model, PROMPT, drafter=prophet(model, text), **given)) == text


# --- the other way to call it ---


def test_as_custom_generate() -> None:
    model = model_()
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=1.2)  # type: ignore[no-untyped-call]
    expected = model.generate(PROMPT, generation_config=config)
    drafter = prophet(model, ids_of(expected))
    tally = Tally()
    found = model.generate(
        PROMPT,
        generation_config=config,
        custom_generate=speculative_generate,
        drafter=drafter,
        budget=30,
        on_step=tally.add,
    )
    assert ids_of(found) == ids_of(expected)
    assert tally.accepted_length > 4
    assert ids_of(
        model.generate(PROMPT, generation_config=config, custom_generate=speculative_generate)
    ) == ids_of(expected)


def test_many_texts_one_after_the_other_with_one_drafter() -> None:
    """A session is made anew for every text, and a model keeps nothing of the last one."""
    model = model_()
    prompts = [torch.tensor([list(ids)]) for ids in itertools.permutations([5, 17, 3], 3)]
    texts = [ids_of(plain(model, ids, max_new_tokens=15)) for ids in prompts]
    drafter = prophet(model, *texts)
    for ids, text in zip(prompts, texts, strict=True):
        assert ids_of(generate(model, ids, drafter=drafter, max_new_tokens=15, do_sample=False)) == text

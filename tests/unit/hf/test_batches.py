"""Several texts in one forward pass: every text is that of its prompt alone, whoever else is in the batch."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList

from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.loop import Step
from draftstore.decoding.planners import Fixed, Planner
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError
from draftstore.hf import generate, pools
from draftstore.hf.batches import Batch
from draftstore.hf.generation import prepare_text
from draftstore.hf.members import Member, Outcome
from draftstore.hf.planning import TYPICAL
from draftstore.hf.runner import MAX_ROWS, Runner
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import (
    Adversary,
    AlwaysWrong,
    EosInside,
    OverBudget,
    Prophet,
    Prophets,
    RandomTrees,
    Silent,
)
from tests.fakes.hf_models import tiny
from tests.reference import Warp, chi_square_p, joint_of_three, warped
from tests.unit.hf.test_sampling import CHECKED, Shaped, exact_scores, options_of, small_model
from tests.unit.hf.test_sampling import VOCAB as FEW

VOCAB, NEW, EOS = 48, 14, 7
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 30, "repetition_penalty": 1.1}
GREEDY = {"do_sample": False}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {}),
    ("qwen2", {"attention": "eager"}),
    ("mistral", {"sliding_window": 9}),
]


class Alone(NamedTuple):
    """A text, and what becomes of it alone.

    Attributes:
        model: number of the model.
        prompt: its ids.
        seed: seed of its random numbers; None: greedy.
        text: prompt and output, by plain generate.
    """

    model: int
    prompt: tuple[int, ...]
    seed: int | None
    text: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {"max_new_tokens": NEW, "eos_token_id": EOS, "pad_token_id": 0} | (
            GREEDY if self.seed is None else SAMPLED
        )


def model_of(number: int) -> Any:
    architecture, changes = MODELS[number]
    return tiny(architecture, vocab_size=VOCAB, **changes)


@functools.cache
def known() -> list[list[Alone]]:
    """Return texts of each model, long and short, greedy and sampled; some end early."""
    draw = np.random.default_rng(3)
    found: list[list[Alone]] = []
    for number in range(len(MODELS)):
        model, texts = model_of(number), []
        for place in range(24):
            prompt = tuple(draw.integers(8, VOCAB, int(draw.integers(1, 24))).tolist())
            alone = Alone(number, prompt, None if place % 2 else place, ())
            torch.manual_seed(place)
            output = model.generate(torch.tensor([prompt]), **alone.options)
            texts.append(alone._replace(text=tuple(output[0].tolist())))
        found.append(texts)
    lengths = [len(each.text) - len(each.prompt) for texts in found for each in texts]
    assert min(lengths) < NEW == max(lengths)
    return found


Make = Callable[[Alone], Drafter | None]
RECYCLING = RecyclingDrafter(VOCAB)
MIXTURE = Mixture([RequestDrafter(VOCAB), RECYCLING])
"""Both are shared by all texts."""
GO_ON = tuple(range(8, 16))
DRAFTERS: dict[str, Make] = {
    "none": lambda alone: None,
    "silent": lambda alone: Silent(VOCAB),
    "random": lambda alone: RandomTrees(VOCAB, len(alone.prompt)),
    "over budget": lambda alone: OverBudget(VOCAB),
    "always wrong": lambda alone: AlwaysWrong(VOCAB, [alone.text + GO_ON]),
    "eos inside": lambda alone: EosInside(VOCAB, [alone.text + GO_ON], EOS),
    "half a prophet": lambda alone: Prophet(VOCAB, [alone.text + GO_ON], error_rate=0.5),
    "prophet": lambda alone: Prophet(VOCAB, [alone.text + GO_ON]),
    "far prophet": lambda alone: Prophet(VOCAB, [alone.text + GO_ON], depth=12),
    "request": lambda alone: RequestDrafter(VOCAB),
    "recycling": lambda alone: RECYCLING,
    "mixture": lambda alone: MIXTURE,
}


def member_of(
    alone: Alone, drafter: Drafter | None, planner: Planner | None = None, **options: Any
) -> Member:
    """Return a text for a batch."""
    random = None if alone.seed is None else torch.Generator().manual_seed(alone.seed)
    prompt = torch.tensor([alone.prompt])
    member = prepare_text(model_of(alone.model), prompt, random=random, **alone.options | options)
    return member.draft(drafter, planner or Fixed(12))


def run(batch: Batch, most: int = 500) -> list[Outcome]:
    """Decode until all texts have left."""
    outcomes: list[Outcome] = []
    for _ in range(most):
        if not len(batch):
            return outcomes
        outcomes += batch.step()
    raise AssertionError("they do not end")


def text_of(member: Member) -> tuple[int, ...]:
    return tuple(member.text.ids.tolist())


# --- every text is that of its prompt alone ---


class Guest(NamedTuple):
    """A text in a batch.

    Attributes:
        text: number of the text.
        drafter: name of its drafter.
        planned: whether a cost curve decides what is verified.
        comes: step before which it joins.
        goes: step before which it leaves, wherever it is.
    """

    text: int
    drafter: str
    planned: bool
    comes: int
    goes: int


NEVER = 1_000_000
guests = st.builds(
    Guest,
    st.integers(0, 23),
    st.sampled_from(sorted(DRAFTERS)),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1, 3, 6]),
    st.sampled_from([2, 4, 8, *[NEVER] * 9]),
)
CHECKS = {"rows": 0, "whole": 0, "moved": 0, "together": 0}


@given(
    model=st.integers(0, len(MODELS) - 1),
    party=st.integers(1, 8).flatmap(lambda size: st.lists(guests, min_size=size, max_size=size)),
    most=st.sampled_from([1, 3, 8]),
    chunk=st.sampled_from([5, 512]),
)
def test_every_text_is_that_of_its_prompt_alone(
    model: int, party: list[Guest], most: int, chunk: int
) -> None:
    batch = Batch(model_of(model), most=most, chunk=chunk)
    texts = [known()[model][guest.text] for guest in party]
    makes = [DRAFTERS[guest.drafter](alone) for guest, alone in zip(party, texts, strict=True)]
    members = [
        member_of(alone, drafter, CostPlanner(TYPICAL["cpu"], 16) if guest.planned else None)
        for guest, alone, drafter in zip(party, texts, makes, strict=True)
    ]
    for step in itertools.count():
        for guest, member in zip(party, members, strict=True):
            if guest.comes == step:
                batch.join(member)
            if guest.goes == step:
                batch.leave(member)
        if step > 6 and not len(batch):
            break
        outcomes = batch.step()
        CHECKS["together"] = max(CHECKS["together"], len(outcomes))
        assert all(outcome.error is None for outcome in outcomes)
    for guest, member, alone, drafter in zip(party, members, texts, makes, strict=True):
        CHECKS["rows"] += 1
        CHECKS["moved"] += drafter.moved if isinstance(drafter, Adversary) else 0
        found = text_of(member)
        assert found == alone.text[: len(found)]
        if guest.goes == NEVER:
            assert found == alone.text
            CHECKS["whole"] += 1


def test_that_was_enough_to_see_something() -> None:
    """Most texts whole, with rows that had to be moved, in large batches."""
    if CHECKS["rows"]:  # otherwise another process has run them
        assert CHECKS["whole"] > CHECKS["rows"] / 2 > 100
        assert CHECKS["moved"] > CHECKS["rows"] / 4
        assert CHECKS["together"] > 2


@pytest.mark.slow
def test_the_joint_of_three_tokens_is_exact_for_every_text_of_a_batch() -> None:
    """As `test_sampling` shows it for a text alone: 25 texts at a time, each with random numbers of its own."""
    warp, width, runs = Warp(temperature=0.8, penalty=1.8), 25, 60
    prompt = torch.tensor([(3, 1)]).expand(width, -1)
    counts = np.zeros((FEW,) * 3, np.int64)
    torch.manual_seed(11)

    class Drafters(Shaped):
        def session(self, *args: Any, **kwargs: Any) -> Any:
            return Shaped([2, 3]).session(*args, **kwargs)

    for _ in range(runs):
        output = generate(small_model(), prompt, drafter=Drafters([]), max_new_tokens=4, **options_of(warp))
        assert isinstance(output, torch.Tensor)
        for row in output[:, 3:].tolist():
            counts[tuple(row)] += 1
    model = warped(exact_scores(), warp)
    expected = sum(
        chance * joint_of_three(model, [3, 1, first]) for first, chance in enumerate(model((3, 1)))
    )
    assert chi_square_p(counts, np.asarray(expected)) > CHECKED


class Curious(Prophet):
    """Keeps the states and candidates that it is told."""

    needs_candidates = True
    needs_hidden = True

    def __init__(self, alone: Alone) -> None:
        super().__init__(VOCAB, [alone.text + GO_ON], error_rate=0.3)
        self.told: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def session(self, prompt_ids: Any, **prefill: Any) -> Adversary:
        self.told.append((prefill["hidden"], prefill["candidates"]))
        return super().session(prompt_ids)

    def observe(self, accepted_ids: Any, **told: Any) -> None:
        self.told.append((told["hidden"], told["candidates"]))
        super().observe(accepted_ids, **told)


def test_drafters_are_told_what_they_are_told_alone() -> None:
    texts = known()[1][:6]
    together, alone = [Curious(each) for each in texts], [Curious(each) for each in texts]
    batch = Batch(model_of(1))
    for each, drafter in zip(texts, together, strict=True):
        batch.join(member_of(each, drafter))
    run(batch)
    for each, mine, other in zip(texts, together, alone, strict=True):
        torch.manual_seed(each.seed or 0)
        generate(model_of(1), torch.tensor([each.prompt]), drafter=other, budget=12, **each.options)
        assert len(mine.told) == len(other.told) > 2
        for (state, candidates), (state_alone, candidates_alone) in zip(mine.told, other.told, strict=True):
            np.testing.assert_allclose(state, state_alone, rtol=1e-5, atol=1e-6)
            assert np.array_equal(candidates, candidates_alone)


# --- one text is nobody else's trouble ---


class Failing(Silent):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(VOCAB)
        self.where = where

    def _fail(self, where: str) -> None:
        if self.where == where and len(self.text) > self.prompt_size:
            raise RuntimeError(where)

    def session(self, prompt_ids: Any, **prefill: Any) -> Adversary:
        if self.where == "session":
            raise RuntimeError("session")
        return super().session(prompt_ids)

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        self._fail("propose")
        if self.where == "stranger":
            return DraftTree(np.array([VOCAB], np.int32), np.array([-1], np.int16), np.zeros(1, np.uint8))
        return super().propose(budget, min_prob)

    def observe(self, accepted_ids: Any, **told: Any) -> None:
        self._fail("observe")
        super().observe(accepted_ids, **told)


class Breaking(LogitsProcessor):
    """Fails at the fifth token."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > len(known()[0][3].prompt) + 4:
            raise RuntimeError("processor")
        return scores


@pytest.mark.parametrize("where", ["session", "propose", "observe", "stranger", "processor"])
def test_what_fails_fails_alone(where: str) -> None:
    texts = known()[0][:6]
    drafters = [Failing(where) if place == 3 and where != "processor" else Prophet(VOCAB, [each.text + GO_ON])
                for place, each in enumerate(texts)]  # fmt: skip
    breaking: dict[str, Any] = (
        {"logits_processor": LogitsProcessorList([Breaking()])} if where == "processor" else {}
    )
    batch = Batch(model_of(0))
    members = [
        member_of(each, drafter, **breaking if place == 3 else {})
        for place, (each, drafter) in enumerate(zip(texts, drafters, strict=True))
    ]
    for member in members:
        batch.join(member)
    outcomes = run(batch)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    assert [outcome.member for outcome in failed] == [members[3]]
    assert where in str(failed[0].error) or "proposes token 48" in str(failed[0].error)
    for place, (member, each) in enumerate(zip(members, texts, strict=True)):
        assert text_of(member) == each.text[: len(text_of(member))]
        assert place == 3 or text_of(member) == each.text


def test_a_prompt_that_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = known()[0][:3]
    batch, members = Batch(model_of(0)), [member_of(each, None) for each in texts]
    read = Runner.read

    def scarce(runner: Runner, slot: int, tokens: Any, *rest: Any) -> Any:
        if tokens.tolist() == list(texts[1].prompt):
            raise MemoryError
        return read(runner, slot, tokens, *rest)

    monkeypatch.setattr(Runner, "read", scarce)
    for member in members:
        batch.join(member)
    failed = [outcome.member for outcome in run(batch) if outcome.error is not None]
    assert failed == [members[1]]
    assert [text_of(members[place]) for place in (0, 2)] == [texts[place].text for place in (0, 2)]


def test_a_text_that_was_never_here_may_leave() -> None:
    batch = Batch(model_of(0))
    batch.leave(member_of(known()[0][0], None))
    assert len(batch) == 0
    assert batch.step() == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((), "the prompt is empty"),
        ((9, VOCAB), "outside the model's vocabulary of 48"),
        ((9, -1), "outside the model's vocabulary of 48"),
    ],
)
def test_prompts_that_are_refused(prompt: tuple[int, ...], words: str) -> None:
    member = member_of(known()[0][0], None)
    member.prompt = np.array(prompt, np.int64)
    with pytest.raises(DecodingError, match=words):
        Batch(model_of(0)).join(member)


# --- steps, prompts, memory ---


def test_long_prompts_are_read_while_others_go_on() -> None:
    short, long = known()[0][1], known()[0][3]
    prompt = tuple(np.random.default_rng(1).integers(8, VOCAB, 200).tolist())
    output = model_of(0).generate(torch.tensor([prompt]), **long.options)
    long = Alone(0, prompt, None, tuple(output[0].tolist()))
    batch = Batch(model_of(0), chunk=32)
    first, second = member_of(short, None), member_of(long, None)
    batch.join(first)
    assert [outcome.member for outcome in batch.step()] == [first]
    batch.join(second)
    came = [[outcome.member for outcome in batch.step()] for _ in range(7)]
    assert came == [[first]] * 6 + [[first, second]], "200 tokens are 7 chunks of 32"
    run(batch)
    assert (text_of(first), text_of(second)) == (short.text, long.text)


def test_a_step_has_one_outcome_for_each_text() -> None:
    texts = known()[2][:5]
    batch = Batch(model_of(2), most=3)
    members = [member_of(each, RequestDrafter(VOCAB)) for each in texts]
    for member in members:
        batch.join(member)
    assert [outcome.member for outcome in batch.step()] == members[:3]
    passes: dict[Member, list[Step]] = {}
    while len(batch):
        outcomes = batch.step()
        assert len({outcome.member for outcome in outcomes}) == len(outcomes)
        for outcome in outcomes:
            assert outcome.step is not None
            passes.setdefault(outcome.member, []).append(outcome.step)
    assert [text_of(member) for member in members] == [each.text for each in texts]
    assert all(step.forward_ns > 0 for steps in passes.values() for step in steps)


def test_the_pool_grows_with_the_texts_and_keeps_them() -> None:
    model = tiny(vocab_size=VOCAB, max_position_embeddings=1024)
    prompt = torch.tensor([[9, 10, 11]])
    options: dict[str, Any] = {
        "max_new_tokens": 500,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    expected = model.generate(prompt, **options)[0].tolist()  # type: ignore[operator]
    batch, sizes = Batch(model), set()
    members = [
        prepare_text(model, prompt, **options).draft(Prophet(VOCAB, [expected]), Fixed(9)) for _ in range(2)
    ]
    for member in members:
        batch.join(member)
    while len(batch):
        batch.step()
        sizes.add(batch._runner.pool.length)
    assert [list(text_of(member)) for member in members] == [expected] * 2
    assert len(sizes) > 1
    assert max(sizes) < 3 * 503


def test_no_more_tokens_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(model_of(0), most=3, tokens=4 * (MAX_ROWS + 30))
    assert batch.positions == 30
    batch.join(member_of(Alone(0, (9,) * 30, None, ()), None))
    with pytest.raises(
        DecodingError, match="a prompt of 31 tokens, and there is memory for 30 of each of 3 texts"
    ):
        batch.join(member_of(Alone(0, (9,) * 31, None, ()), None))
    with pytest.raises(DecodingError, match="300 tokens are too few for 3 texts"):
        Batch(model_of(0), most=3, tokens=300)
    monkeypatch.setattr(pools, "CPU_SHARE", 1e-9)
    with pytest.raises(DecodingError, match="tokens are too few for 64 texts"):
        Batch(model_of(0))


def test_rows_of_a_pass_are_shared_by_its_texts() -> None:
    batch = Batch(model_of(0))
    for each in itertools.islice(itertools.cycle(known()[0]), 40):
        batch.join(member_of(each, RandomTrees(VOCAB), Fixed(127)))
    while len(batch):
        steps = [outcome.step for outcome in batch.step() if outcome.step is not None]
        assert sum(len(step.tree) + 1 for step in steps if len(step.tree)) <= 512


# --- in one call ---


def padded(texts: Sequence[Alone]) -> dict[str, Any]:
    """Return prompts as the tokenizers of transformers give them: padded on the left."""
    longest = max(len(each.prompt) for each in texts)
    ids = [[0] * (longest - len(each.prompt)) + list(each.prompt) for each in texts]
    mask = [[0] * (longest - len(each.prompt)) + [1] * len(each.prompt) for each in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_greedy_batches_are_their_rows_alone(number: int) -> None:
    """Plain generate is no judge: with `eager` it gives other texts to padded prompts than to the same alone."""
    texts = [each for each in known()[number] if each.seed is None][:8]
    inputs = padded(texts)
    start = inputs["input_ids"].shape[1]
    told = [list(each.text[len(each.prompt) :]) for each in texts]
    longest = max(map(len, told))
    filled = [[*row, *[0] * (longest - len(row))] for row in told]
    expected = torch.cat([inputs["input_ids"], torch.tensor(filled)], dim=1)
    steps: list[Step] = []

    drafter = Prophets(VOCAB, [each.text for each in texts], 0.2)
    output: Any = generate(
        model_of(number), **inputs, drafter=drafter, on_step=steps.append, **texts[0].options
    )
    assert torch.equal(output, expected)
    passes = [sum(step.text == row for step in steps) for row in range(len(texts))]
    came = [sum(len(step.tokens) for step in steps if step.text == row) for row in range(len(texts))]
    assert came == list(map(len, told))
    assert sum(passes) < 0.7 * sum(came)
    assert output.shape[1] == start + longest
    wrapped: Any = generate(
        model_of(number), **inputs, drafter=drafter, return_dict_in_generate=True, **texts[0].options
    )
    assert torch.equal(wrapped.sequences, expected)


def test_seeds_make_a_row_that_of_its_prompt_alone() -> None:
    texts = [each for each in known()[0] if each.seed is not None]
    inputs = padded(texts)
    options = texts[0].options | {"repetition_penalty": 1.0}  # which sees the padding, in plain generate too
    expected = []
    for each in texts:
        torch.manual_seed(each.seed or 0)
        output = model_of(0).generate(torch.tensor([each.prompt]), **options)
        expected.append(output[0, len(each.prompt) :].tolist())
    seeds = [each.seed or 0 for each in texts]
    output = generate(model_of(0), **inputs, drafter=RandomTrees(VOCAB), seeds=seeds, **options)
    assert isinstance(output, torch.Tensor)
    start = inputs["input_ids"].shape[1]
    for row, told in zip(output[:, start:].tolist(), expected, strict=True):
        assert row[: len(told)] == told
        assert set(row[len(told) :]) <= {0}
    alone = generate(model_of(0), torch.tensor([texts[2].prompt]), seeds=[texts[2].seed or 0], **options)
    assert isinstance(alone, torch.Tensor)
    assert alone[0, len(texts[2].prompt) :].tolist() == expected[2]


def test_torchs_seed_settles_a_sampled_batch() -> None:
    prompts = torch.tensor([[9, 10, 11], [12, 13, 14]])
    found: list[Any] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        options: dict[str, Any] = SAMPLED | {
            "max_new_tokens": 12,
            "num_return_sequences": 3,
            "pad_token_id": 0,
        }
        found.append(generate(model_of(0), prompts, drafter=RequestDrafter(VOCAB), **options))
    assert found[0].shape == (6, 15)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len({tuple(row) for row in found[0].tolist()}) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"streamer": object()}, "streamer for several texts"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores with drafts"),
        ({"token_type_ids": torch.zeros((2, 3), dtype=torch.int64)}, "token_type_ids"),
        ({"position_ids": torch.tensor([[0, 1, 2], [3, 4, 5]])}, "position_ids other than"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [9 + row]}, "PrefixConstrainedLogitsProcessor"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"seeds": [1]}, "1 seeds for 2 texts"),
    ],
)
def test_what_one_text_alone_may_ask_for(options: dict[str, Any], words: str) -> None:
    prompts = torch.tensor([[9, 10, 11], [12, 13, 14]])
    with pytest.raises((DecodingError, ValueError), match=words):
        generate(model_of(0), prompts, drafter=Silent(VOCAB), max_new_tokens=4, **options)


def test_without_a_pad_id_texts_are_filled_up_with_their_end() -> None:
    model, prompts = model_of(0), torch.tensor([[9, 10, 11], [12, 13, 14]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": None}
    free = model.generate(prompts, **options, eos_token_id=None)
    (end,) = {int(free[0, 4])} - set(free[1].tolist())
    expected = model.generate(prompts, **options, eos_token_id=[end, 1])
    assert expected[0, -1] == end
    output = generate(model, prompts, drafter=RequestDrafter(VOCAB), **options, eos_token_id=[end, 1])
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, expected)


def test_padding_behind_a_prompt_is_refused() -> None:
    """Plain generate goes on behind the padding."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(DecodingError, match="pad on the left"):
        generate(
            model_of(0), torch.ones_like(mask), attention_mask=mask, drafter=Silent(VOCAB), max_new_tokens=4
        )


def test_batches_in_inference_mode() -> None:
    prompts = torch.tensor([[9, 10, 11], [12, 13, 14]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "drafter": RequestDrafter(VOCAB)}
    expected = generate(model_of(0), prompts, **options)
    with torch.inference_mode():
        output = generate(model_of(0), prompts, **options)
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, expected)  # type: ignore[arg-type]


def test_memory_that_cannot_be_had_leaves_no_half_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = known()[0][:3]
    batch, members = Batch(model_of(0)), [member_of(each, None) for each in texts]
    taken: list[int] = []
    real = torch.Tensor.new_zeros

    def scarce(states: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        taken.append(1)
        if len(taken) == 2:
            raise MemoryError("of values, after that of keys")
        return real(states, *size, **options)

    for member in members[:2]:
        batch.join(member)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", scarce)
        with pytest.raises(MemoryError):
            batch.step()
    for member in members[:2]:
        batch.leave(member)
    assert batch._runner.pool.length == 0
    batch.join(members[2])
    run(batch)
    assert text_of(members[2]) == texts[2].text


def test_what_a_text_leaves_behind_spoils_no_other() -> None:
    alone, late = known()[0][1], known()[0][3]
    batch, member = Batch(model_of(0)), member_of(late, None)
    batch.join(member_of(alone, None, max_new_tokens=40))
    batch.step()
    layers: Any = batch._runner.pool.cache.layers
    for layer in layers:
        layer.keys[1:], layer.values[1:] = torch.nan, torch.nan  # as of numbers too large for their type
    batch.join(member)
    run(batch)
    assert text_of(member) == late.text

"""Several texts in one forward pass: failures are isolated, prompts are prefilled in chunks, memory is shared.

`test_matrix` shows that every text is the same as from its prompt alone.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from draftstore.decoding.budget import Fixed
from draftstore.decoding.loop import Step
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError
from draftstore.hf import generate, pools
from draftstore.hf.batches import Batch
from draftstore.hf.members import Member, prepare_text
from draftstore.hf.runner import MAX_ROWS, Runner
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import Adversary, Prophet, Prophets, RandomTrees, Silent
from tests.unit.hf.test_matrix import GO_ON, MODELS, SETTINGS, VOCAB, Known, known, model_of

PLAIN: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def greedy() -> list[Known]:
    return [text for text in known("llama") if not text.sampled]


def member_of(text: Known, drafter: Drafter | None = None, **options: Any) -> Member:
    """Return a greedy text for a batch."""
    member = prepare_text(model_of("llama"), torch.tensor([text.prompt]), **text.options | options)
    return member.draft(drafter, Fixed(12))


def run(batch: Batch) -> list[tuple[Member, Step | Exception]]:
    """Decode until all texts have left."""
    results: list[tuple[Member, Step | Exception]] = []
    while len(batch):
        results += batch.step()
    return results


def text_of(member: Member) -> tuple[int, ...]:
    return tuple(member.text.ids.tolist())


# --- what fails fails alone ---


class Failing(Silent):
    """Fails in one place."""

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

    def observe(self, accepted_ids: Any, **feedback: Any) -> None:
        self._fail("observe")
        super().observe(accepted_ids, **feedback)


class Breaking(LogitsProcessor):
    """Fails at the fifth token."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > len(greedy()[3].prompt) + 4:
            raise RuntimeError("processor")
        return scores


class BrokenPipe:
    """A streamer that takes one token, or fewer."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken

    def put(self, token: torch.Tensor) -> None:
        self.taken += len(token)
        if self.taken > 1:
            raise BrokenPipeError("show")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["prompt", "session", "observe", "processor", "show"])
def test_a_failing_text_fails_alone(where: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, read = greedy()[:6], Runner.read
    drafters: list[Adversary] = [Prophet(VOCAB, [text.text + GO_ON]) for text in texts]
    options: list[dict[str, Any]] = [{} for _ in texts]
    if where == "processor":
        options[3]["logits_processor"] = LogitsProcessorList([Breaking()])
    elif where != "prompt":
        drafters[3] = Failing(where)

    def scarce(runner: Runner, slot: int, prompts: Any, *rest: Any) -> Any:
        if where == "prompt" and texts[3].prompt in [tuple(prompt.tolist()) for prompt in prompts]:
            raise MemoryError(where)
        return read(runner, slot, prompts, *rest)

    monkeypatch.setattr(Runner, "read", scarce)
    batch = Batch(model_of("llama"), ahead=ahead)
    members = [
        member_of(text, drafter, **rest) for text, drafter, rest in zip(texts, drafters, options, strict=True)
    ]
    if where == "show":
        members[3]._streamer = BrokenPipe()
    for member in members:
        batch.join(member)
    ((failed, error),) = [each for each in run(batch) if isinstance(each[1], Exception)]
    assert failed is members.pop(3)
    assert str(error) == where
    assert text_of(failed) == texts[3].text[: len(text_of(failed))]
    del texts[3]
    assert [text_of(member) for member in members] == [text.text for text in texts]


def test_a_text_that_was_never_here_may_leave() -> None:
    batch = Batch(model_of("llama"))
    batch.leave(member_of(greedy()[0]))
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
    member = member_of(greedy()[0])
    member.prompt = np.array(prompt, np.int64)
    with pytest.raises(DecodingError, match=words):
        Batch(model_of("llama")).join(member)


# --- steps, prompts, memory ---


def test_a_pass_that_is_queued_early_changes_no_draft() -> None:
    """Texts that join in turn have the same steps, whether or not results wait for the next pass."""
    found = []
    for ahead in (False, True):
        batch, texts = Batch(model_of("llama"), ahead=ahead), greedy()[:6]
        members = [member_of(text, RequestDrafter(VOCAB)) for text in texts]
        steps: dict[Member, list[Any]] = {member: [] for member in members}
        for number in itertools.count():
            if number < len(members):
                batch.join(members[number])
            for member, result in batch.step():
                assert isinstance(result, Step)
                steps[member].append((result.tree, result.path, result.tokens.tolist(), result.sources))
            if not len(batch):
                break
        assert [text_of(member) for member in members] == [text.text for text in texts]
        found.append([*steps.values()])
    assert found[0] == found[1]


def test_a_failed_pass_brings_back_no_text_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, texts = Batch(model_of("llama"), ahead=True), greedy()[:3]
    members = [member_of(text, RequestDrafter(VOCAB)) for text in texts]
    for member in members[:2]:
        batch.join(member)
    batch.step()
    batch.leave(members[0])
    with monkeypatch.context() as patch:
        patch.setattr(pools.CachePool, "move", None)
        with pytest.raises(TypeError):
            batch.step()
    batch.leave(members[1])
    batch.join(members[2])
    assert {member for member, _ in run(batch)} == {members[2]}
    assert text_of(members[2]) == texts[2].text


class Straying(Fixed):
    """A planner whose trees have a parent far outside."""

    def trim(self, tree: DraftTree) -> DraftTree:
        parents = tree.parents.copy()
        parents[1:] = 30_000
        return DraftTree(tree.tokens, parents, tree.levels)


def test_a_planner_that_returns_no_tree_ends_its_text_alone() -> None:
    batch, texts = Batch(model_of("llama")), greedy()[:2]
    members = [member_of(text, Prophet(VOCAB, [text.text + GO_ON])) for text in texts]
    members[0].planner = Straying(12)
    for member in members:
        batch.join(member)
    errors = [(member, str(error)) for member, error in run(batch) if isinstance(error, Exception)]
    assert errors == [(members[0], "node 1 has parent 30000, expected -1 or an earlier node")]
    assert text_of(members[1]) == texts[1].text


def test_results_are_returned_although_the_next_pass_cannot_be_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, member = Batch(model_of("llama"), ahead=True), member_of(greedy()[0], RequestDrafter(VOCAB))
    batch.join(member)
    found = batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", None)
        found += batch.step()
        with pytest.raises(TypeError):
            batch.step()
    tokens = [token for _, done in found if isinstance(done, Step) for token in done.tokens.tolist()]
    assert len(found) == 2
    assert text_of(member) == (*greedy()[0].prompt, *tokens)


def test_a_text_leaves_between_steps_and_joins_once() -> None:
    batch, members = Batch(model_of("llama")), [member_of(text) for text in greedy()[:2]]
    for member in members:
        batch.join(member)
    members[0].show = lambda _: batch.leave(members[1])  # type: ignore[method-assign, assignment]
    errors = [str(error) for _, error in run(batch) if isinstance(error, Exception)]
    assert errors == ["a text can leave between two steps only"]
    assert text_of(members[1]) == greedy()[1].text
    with pytest.raises(DecodingError, match="a text joins once"):
        batch.join(members[1])


def test_a_streamer_that_fails_at_once_leaves_no_drafts_behind() -> None:
    batch, member = Batch(model_of("llama")), member_of(greedy()[0], RequestDrafter(VOCAB))
    member._streamer = BrokenPipe(1)
    batch.join(member)
    assert [str(error) for _, error in run(batch)] == ["show"]
    assert len(batch._slots) == 0


def test_texts_that_leave_in_the_middle_of_a_step_are_left_out() -> None:
    batch, texts = Batch(model_of("llama"), ahead=True), greedy()[:4]
    members = [member_of(text, RequestDrafter(VOCAB)) for text in texts]
    for member in members[:3]:
        batch.join(member)
    batch.step()
    batch.step()
    sizes = [len(member.text) for member in members[:3]]
    for member in members[:2]:
        batch.leave(member)
    assert len(batch) == 1
    assert [member for member, _ in batch.step()] == [members[2]]
    assert [len(member.text) for member in members[:2]] == sizes[:2]
    batch.leave(members[2])  # nobody waits for the queued pass
    assert (len(batch), batch.step()) == (0, [])
    batch.join(members[3])
    run(batch)
    assert text_of(members[3]) == texts[3].text


def test_long_prompts_are_read_while_others_go_on() -> None:
    prompt = tuple(np.random.default_rng(1).integers(8, VOCAB, 200).tolist())
    batch = Batch(model_of("llama"), chunk=32)
    first, second = member_of(greedy()[0]), member_of(greedy()[1]._replace(prompt=prompt))
    batch.join(first)
    assert [member for member, _ in batch.step()] == [first]
    batch.join(second)
    came = [[member for member, _ in batch.step()] for _ in range(7)]
    assert came == [[first]] * 6 + [[first, second]], "200 tokens are 7 chunks of 32"


def test_the_pool_grows_with_the_texts_and_keeps_them() -> None:
    prompt = torch.tensor([[9, 10, 11]])
    options = PLAIN | {"max_new_tokens": 300, "eos_token_id": None}
    expected = model_of("llama").generate(prompt, **options)[0].tolist()
    batch, sizes = Batch(model_of("llama")), set()
    members = [prepare_text(model_of("llama"), prompt, **options) for _ in range(2)]
    for member in members:
        batch.join(member.draft(Prophet(VOCAB, [expected]), Fixed(9)))
    while len(batch):
        batch.step()
        sizes.add(batch._runner.pool.length)
    assert [list(text_of(member)) for member in members] == [expected] * 2
    assert len(sizes) > 1
    assert max(sizes) < 3 * 303


def test_no_more_tokens_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(model_of("llama"), most=3, tokens=4 * (MAX_ROWS + 30))
    assert batch.positions == 30
    batch.join(member_of(greedy()[0]._replace(prompt=(9,) * 30)))
    with pytest.raises(
        DecodingError, match="a prompt of 31 tokens exceeds the memory of 30 tokens for each of 3 texts"
    ):
        batch.join(member_of(greedy()[0]._replace(prompt=(9,) * 31)))
    with pytest.raises(DecodingError, match="300 tokens are too few for 3 texts"):
        Batch(model_of("llama"), most=3, tokens=300)
    monkeypatch.setattr(pools, "CPU_SHARE", 1e-9)
    with pytest.raises(DecodingError, match="tokens are too few for 64 texts"):
        Batch(model_of("llama"))


def test_memory_that_cannot_be_had_leaves_no_half_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = greedy()[:3]
    batch, members = Batch(model_of("llama")), [member_of(text) for text in texts]
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


def test_leftover_keys_do_not_affect_the_next_text() -> None:
    alone, late = greedy()[:2]
    batch, member = Batch(model_of("llama")), member_of(late)
    batch.join(member_of(alone, max_new_tokens=40))
    batch.step()
    layers: Any = batch._runner.pool.cache.layers
    for layer in layers:
        layer.keys[1:], layer.values[1:] = torch.nan, torch.nan  # as of numbers too large for their type
    batch.join(member)
    run(batch)
    assert text_of(member) == late.text


# --- in one call ---


def padded(texts: Sequence[Known]) -> dict[str, Any]:
    """Return prompts as the tokenizers of transformers give them: padded on the left."""
    longest = max(len(text.prompt) for text in texts)
    ids = [[0] * (longest - len(text.prompt)) + list(text.prompt) for text in texts]
    mask = [[0] * (longest - len(text.prompt)) + [1] * len(text.prompt) for text in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_batches_are_their_rows_alone(name: str) -> None:
    """Plain generate is no judge: with `eager` it gives other texts to padded prompts than to the same alone."""
    texts = [text for text in known(name) if not text.sampled][:8]
    inputs = padded(texts)
    outputs = [list(text.text[len(text.prompt) :]) for text in texts]
    longest = max(map(len, outputs))
    filled = [[*row, *[0] * (longest - len(row))] for row in outputs]
    expected = torch.cat([inputs["input_ids"], torch.tensor(filled)], dim=1)
    steps: list[Step] = []
    drafter = Prophets(VOCAB, [text.text for text in texts], 0.2)
    options = texts[0].options | {"return_dict_in_generate": True}
    output: Any = generate(model_of(name), **inputs, drafter=drafter, on_step=steps.append, **options)
    assert torch.equal(output.sequences, expected)
    came = [sum(len(step.tokens) for step in steps if step.text == row) for row in range(len(texts))]
    assert came == list(map(len, outputs))
    assert len(steps) < 0.7 * sum(came)


def test_a_penalty_ignores_the_padding_of_each_row() -> None:
    inputs = padded([text for text in known("llama") if not text.sampled][:4])
    options = PLAIN | {"repetition_penalty": 1.3, "max_new_tokens": 20}
    expected = model_of("llama").generate(**inputs, **options)
    output: Any = generate(model_of("llama"), **inputs, drafter=RandomTrees(VOCAB), **options)
    assert torch.equal(output, expected)


def test_seeds_make_a_row_that_of_its_prompt_alone() -> None:
    texts = [text for text in known("llama") if text.sampled][:6]
    inputs = padded(texts)
    options = texts[0].options | {"repetition_penalty": 1.0}  # which sees the padding, in plain generate too
    seeds = [text.seed for text in texts]
    output: Any = generate(model_of("llama"), **inputs, drafter=RandomTrees(VOCAB), seeds=seeds, **options)
    start = inputs["input_ids"].shape[1]
    for row, text in zip(output[:, start:].tolist(), texts, strict=True):
        torch.manual_seed(text.seed)
        alone = model_of("llama").generate(torch.tensor([text.prompt]), **options)
        expected = alone[0, len(text.prompt) :].tolist()
        assert row == expected + [0] * (len(row) - len(expected))


def test_torchs_seed_settles_a_sampled_batch() -> None:
    prompts = torch.tensor([[9, 10, 11], [12, 13, 14]])
    options: dict[str, Any] = SETTINGS[True] | {
        "max_new_tokens": 12,
        "num_return_sequences": 3,
        "pad_token_id": 0,
    }
    found: list[Any] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(generate(model_of("llama"), prompts, drafter=RequestDrafter(VOCAB), **options))
    assert found[0].shape == (6, 15)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len({tuple(row) for row in found[0].tolist()}) == 6


def test_without_a_pad_id_texts_are_filled_up_with_their_end() -> None:
    model, prompts = model_of("llama"), torch.tensor([[9, 10, 11], [12, 13, 14]])
    options = PLAIN | {"max_new_tokens": 6, "pad_token_id": None}
    free = model.generate(prompts, **options, eos_token_id=None)
    (end,) = {int(free[0, 4])} - set(free[1].tolist())
    expected = model.generate(prompts, **options, eos_token_id=[end, 1])
    assert expected[0, -1] == end
    output: Any = generate(model, prompts, drafter=RequestDrafter(VOCAB), **options, eos_token_id=[end, 1])
    assert torch.equal(output, expected)

"""What drafters learn of a pass, decoding with dense stores, and replays that match live decoding."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from draftstore.decoding.loop import Step, Tally
from draftstore.decoding.replay import Recording, replay
from draftstore.errors import DraftstoreError
from draftstore.hf import generate
from draftstore.hf.passes import Pass, Rows, Wants
from draftstore.hf.states import StateReader, with_states
from draftstore.stores.dresd.store import DresdStore
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import Adversary, Knowing
from tests.fakes.dense_stores import make_dense_store, make_projection
from tests.fakes.hf_models import build, needs_gpu, tiny

VOCAB = 40

# --- feedback of sessions ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_is_rounded_to_float16(dtype: torch.dtype) -> None:
    hidden = torch.tensor([[0.0], [1.0078125], [1e5], [-1e5], [float("nan")]]).to(dtype)
    whole = Pass(SimpleNamespace(logits=torch.zeros(1, 5, 3)), 5, Wants(best=False), [hidden[None]])
    found = whole.states(np.arange(5))
    expected = np.array([[0.0], [1.0078125], [np.inf], [-np.inf], [np.nan]], np.float16)
    np.testing.assert_array_equal(found, expected, strict=True)
    for first, stop in ((0, 2), (2, 5)):
        rows = Rows(whole, whole.fetch, slice(first, stop))
        alone = [rows.hidden(row) for row in range(stop - first)]
        np.testing.assert_array_equal(alone, expected[first:stop], strict=True)
    some = np.array([4, 0, 0, 2])
    np.testing.assert_array_equal(whole.states(some), expected[some], strict=True)


class Curious(Knowing):
    """A prophet of one text that asks for all feedback, and checks it against passes without a cache."""

    needs_candidates = needs_hidden = True

    def __init__(self, model: Any, text: Sequence[int]) -> None:
        super().__init__(model.config.vocab_size, [[*text, *range(8)]])
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
        return [(self.other_than(truth[0]), *truth), truth]

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        before = list(self.text)
        super().observe(accepted_ids, **feedback)
        self.check(before, feedback["tree"], feedback["candidates"], feedback["hidden"], self.text[:-1])

    @torch.no_grad()
    def check(self, text: list[int], tree: DraftTree, candidates: Any, hidden: Any, last: list[int]) -> None:
        """Check the candidates of every row, and the hidden state that predicted the last token."""
        self.passes += 1
        device = self.model.device
        assert (candidates.shape, candidates.dtype) == ((len(tree) + 1, 8), np.int32)
        for row in range(len(tree) + 1) if self.model.dtype == torch.float64 else ():
            path = tree.tokens[tree.path(row - 1)].tolist() if row else []
            scores = self.model(torch.tensor([[*text, *path]], device=device)).logits[0, -1]
            assert candidates[row].tolist() == scores.topk(8).indices.tolist()
        states = self.model.base_model(torch.tensor([last], device=device)).last_hidden_state[0, -1]
        assert (hidden.shape, hidden.dtype) == (states.shape, np.float16)
        np.testing.assert_allclose(hidden, states.float().cpu().numpy(), rtol=1e-3, atol=1e-3)


class CuriousDrafter:
    """Gives each of several texts a session of its own."""

    needs_candidates = needs_hidden = True

    def __init__(self, model: Any, texts: Sequence[Sequence[int]]) -> None:
        self.vocab_size = model.config.vocab_size
        self.sessions: list[Curious] = []
        self._model, self._texts = model, texts

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> Adversary:
        begin = np.asarray(prompt_ids).tolist()
        (text,) = [text for text in self._texts if list(text[: len(begin)]) == begin]
        self.sessions.append(Curious(self._model, text))
        return self.sessions[-1].session(prompt_ids, **prefill)


def check_told(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> None:
    """Decode texts together with drafters that check their feedback."""
    ids = torch.tensor(prompts, device=model.device)
    options = {"max_new_tokens": 22, "do_sample": False} | options
    texts = [model.generate(ids[row : row + 1], **options)[0].tolist() for row in range(len(prompts))]
    drafter = CuriousDrafter(model, texts)
    output: Any = generate(model, ids, drafter=drafter, **options)
    assert output.tolist() == texts
    assert all(7 <= session.passes <= 9 for session in drafter.sessions)


@pytest.mark.parametrize(
    ("architecture", "changes", "options"),
    [
        ("llama", {}, {"repetition_penalty": 1.3}),  # raw logits decide the candidates
        ("qwen3", {"attention": "eager"}, {}),
        ("mistral", {"sliding_window": 8}, {}),
        ("gpt2", {}, {}),
    ],
)
def test_drafters_get_the_candidates_of_every_row_and_the_last_state(
    architecture: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    model = tiny(architecture, vocab_size=VOCAB, **changes)
    check_told(model, [[5, 7, 11, 13]], **options)
    check_told(model, [[5, 7, 11], [12, 3, 9], [3, 8, 20]], **options)


@needs_gpu
def test_drafters_get_the_states_of_a_gpu() -> None:
    model = torch.nn.Module.to(build(vocab_size=VOCAB, dtype=torch.float32), "cuda")
    check_told(model, [[5, 7, 11], [12, 3, 9]])


def test_threads_with_models_of_their_own_do_not_mix_them_up() -> None:
    """Two models with hidden states of other sizes, each of which two threads share."""
    models = [tiny(vocab_size=VOCAB), tiny("qwen3", vocab_size=VOCAB, hidden_size=24)]
    prompts = [[[start, start + 2, start + 5]] for start in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for checked in [pool.submit(check_told, model, prompt) for prompt in prompts for model in models]:
            checked.result()


def test_a_store_of_another_model_is_refused_at_the_prefill(tmp_path: Path) -> None:
    store = DresdStore.open(make_dense_store(tmp_path / "other", [[1, 2, 3]], vocab_size=VOCAB))
    with pytest.raises(DraftstoreError, match=r"of shape \(1, 32\), expected \(1, 16\): use a store"):
        generate(tiny(vocab_size=VOCAB), torch.tensor([[5, 7]]), drafter=store.drafter(), max_new_tokens=4)


# --- replays ---


def test_a_replay_equals_live_decoding(tmp_path: Path) -> None:
    model: Any = tiny(vocab_size=VOCAB)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 70}
    prompts = [torch.tensor([[start, start + 2, start + 5]]) for start in range(6)]
    texts = [model.generate(prompt, **options)[0].numpy() for prompt in prompts]
    states = dict(StateReader(model).read(texts))
    path = make_dense_store(
        tmp_path / "own",
        [text.tolist() for text in texts],
        [states[place] for place in range(len(texts))],
        vocab_size=VOCAB,
        projection=make_projection(hidden_size=32, dims=16),
    )
    drafter, recordings, tally = DresdStore.open(path).drafter(), [], Tally()
    for prompt, text in zip(prompts, texts, strict=True):
        steps: list[Step] = []
        output: Any = generate(model, prompt, drafter=drafter, budget=32, on_step=steps.append, **options)
        assert output[0].tolist() == text.tolist()
        recordings.append(Recording("", text[:3].astype(np.int32), text[3:].astype(np.int32)))
        for step in steps[1:]:
            tally.add(step)
    result = replay(drafter, with_states(model, recordings), budget=32)
    assert (result.passes, result.tokens) == (tally.passes, tally.tokens)
    assert result.accepted == tally.accepted > 0
    assert result.drafted >= tally.drafted, "decoding live cuts what would go beyond the end"


def test_recordings_get_the_states_that_predicted_their_outputs() -> None:
    model = tiny(vocab_size=VOCAB)
    text = np.random.default_rng(0).integers(0, VOCAB, 20).astype(np.int32)
    ((_, states),) = StateReader(model).read([text])
    rows = [Recording(str(cut), text[:cut], text[cut:]) for cut in (7, 0, 19, 20)] * 6
    found = list(with_states(model, iter(rows)))
    assert [row.id for row in found] == [row.id for row in rows]
    for row in found:
        begin = len(row.prompt)
        if begin == len(text):
            assert row.hidden is None
            continue
        assert row.hidden is not None
        assert row.hidden.shape == (len(text) - begin, 32)
        assert np.isnan(row.hidden[0]).all() == (begin == 0), "without a prompt, nothing predicts the first"
        known = row.hidden[1:] if begin == 0 else row.hidden
        np.testing.assert_allclose(known, states[max(begin, 1) - 1 : -1], rtol=1e-4, atol=1e-4)

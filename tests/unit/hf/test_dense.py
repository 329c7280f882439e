"""Decoding with dense stores: the states that drafters are told, the same text as without, and replays as live."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

from draftstore.decoding.loop import Step, Tally
from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.drafter import ContextSession, Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError
from draftstore.hf import generate
from draftstore.hf.passes import Rows
from draftstore.hf.states import StateReader, with_states
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.stores.dresd.store import DresdDrafter, DresdStore
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import Prophet
from tests.fakes.dense_stores import make_dense_store, make_projection
from tests.fakes.gpus import needs_gpu
from tests.fakes.hf_models import STORIES, build, stories, story_ids, tiny
from tests.reference import make_index

VOCAB = 40
PROMPT = torch.tensor([[5, 7, 11, 13]])


def states_of(model: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return float32 [n, d], the states of a text that is read at once."""
    ((_, states),) = StateReader(model).read([np.array(ids)])
    return states


# --- what sessions are told ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_state_is_rounded_to_float16(dtype: torch.dtype) -> None:
    hidden = torch.tensor([[0.0], [1.0078125], [1e5], [-1e5], [float("nan")]]).to(dtype)
    rows = Rows(torch.zeros(5, 3), hidden, lambda: np.empty((0, 1), np.int64), slice(0, 5), 0)
    found = [rows.hidden(row) for row in range(5)]
    expected = np.array([[0.0], [1.0078125], [np.inf], [-np.inf], [np.nan]], np.float16)
    np.testing.assert_array_equal(found, expected, strict=True)


class Listening(Prophet):
    """A prophet that notes the states that it is told, each with the length of the text then."""

    needs_hidden = True

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(VOCAB, texts, error_rate=0.3)
        self.told: list[tuple[int, NDArray[np.floating[Any]] | None]] = []

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.floating[Any]] | None = None, **_prefill: Any
    ) -> "Listening":
        super().session(prompt_ids)
        self.told.append((len(self.text), hidden))
        return self

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.floating[Any]] | None = None,
    ) -> None:
        super().observe(accepted_ids, tree=tree)
        self.told.append((len(self.text), hidden))


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"attention": "eager"},
    "mistral": {"sliding_window": 8},
    "gpt2": {},
}


@pytest.mark.parametrize("architecture", MODELS)
def test_a_session_gets_the_state_that_predicted_the_last_token(architecture: str) -> None:
    check_states(tiny(architecture, vocab_size=VOCAB, **MODELS[architecture]))


@needs_gpu
def test_a_session_gets_it_from_a_gpu() -> None:
    check_states(torch.nn.Module.to(build(vocab_size=VOCAB, dtype=torch.float32), "cuda"))


def test_threads_are_told_the_states_of_their_own_texts() -> None:
    model = tiny(vocab_size=VOCAB)
    prompts = [torch.tensor([[start, start + 2, start + 5]]) for start in range(12)]
    with ThreadPoolExecutor(3) as pool:
        for checked in [pool.submit(check_states, model, prompt) for prompt in prompts]:
            checked.result()


def test_threads_with_models_of_their_own_do_not_mix_them_up() -> None:
    """Two models with hidden states of other sizes at once."""
    models = [tiny(vocab_size=VOCAB), tiny("qwen3", vocab_size=VOCAB, hidden_size=24)]
    prompts = [torch.tensor([[start, start + 2, start + 5]]) for start in range(3)]
    with ThreadPoolExecutor(4) as pool:
        for checked in [pool.submit(check_states, model, prompt) for prompt in prompts for model in models]:
            checked.result()


def check_states(model: Any, prompt: torch.Tensor = PROMPT) -> None:
    """Decode, and compare the states that were told with those of the whole text."""
    prompt = prompt.to(model.device)
    text = model.generate(prompt, do_sample=False, max_new_tokens=30)[0].tolist()
    drafter = Listening([[*text, *range(8)]])
    output = generate(model, prompt, drafter=drafter, do_sample=False, max_new_tokens=30)
    assert isinstance(output, torch.Tensor)
    assert output[0].tolist() == text
    states = states_of(model, text)
    assert 3 < len(drafter.told) < 30
    for length, hidden in drafter.told:
        assert hidden is not None
        assert hidden.dtype == np.float16
        np.testing.assert_allclose(hidden, states[length - 2], rtol=1e-3, atol=1e-3)


def test_a_store_of_another_model_is_refused_at_the_prefill(tmp_path: Path) -> None:
    store = DresdStore.open(make_dense_store(tmp_path / "other", [[1, 2, 3]], vocab_size=VOCAB))
    with pytest.raises(DraftstoreError, match=r"of shape \(1, 32\), expected \(1, 16\): use a store"):
        generate(tiny(vocab_size=VOCAB), PROMPT, drafter=store.drafter(), max_new_tokens=4)


# --- the same text ---


@pytest.fixture(scope="module")
def told(data: Path) -> list[list[int]]:
    """Return stories that the trained model tells, by itself."""
    model: Any = stories(data)
    prompts = [story_ids(data, text) for text in STORIES]
    return [model.generate(ids, do_sample=False, max_new_tokens=80)[0].tolist() for ids in prompts]


@pytest.fixture(scope="module")
def dense(data: Path, told: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> DresdStore:
    """Return a store of all stories but the first, with their own states."""
    states = dict(StateReader(stories(data)).read([np.array(story) for story in told]))
    return DresdStore.open(
        make_dense_store(
            tmp_path_factory.mktemp("dense") / "own",
            told[1:],
            [states[place] for place in range(1, len(told))],
            vocab_size=512,
            projection=make_projection(hidden_size=64, dims=32),
        )
    )


@pytest.fixture(scope="module")
def garbage(told: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> DresdStore:
    """Return a store of noise: tokens and vectors mean nothing."""
    random = np.random.default_rng(3)
    documents = [random.permutation(story).tolist() for story in told]
    return DresdStore.open(
        make_dense_store(
            tmp_path_factory.mktemp("dense") / "garbage",
            documents,
            vocab_size=512,
            projection=make_projection(hidden_size=64, dims=16, seed=1),
        )
    )


class Deafened(DresdDrafter):
    """A drafter that hears nothing but noise: every other state is NaN, or infinite."""

    def __init__(self, drafter: DresdDrafter) -> None:
        vars(self).update(vars(drafter))

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.floating[Any]] | None = None, **_prefill: Any
    ) -> ContextSession:
        return DeafenedSession(self, prompt_ids, hidden)


class DeafenedSession(ContextSession):
    count = 0

    def observe(
        self, accepted_ids: ArrayLike, *, hidden: NDArray[np.floating[Any]] | None = None, **feedback: Any
    ) -> None:
        self.count += 1
        if hidden is not None and self.count % 2:
            hidden = np.full_like(hidden, (np.nan, np.inf, -np.inf)[self.count % 3])
        super().observe(accepted_ids, hidden=hidden, **feedback)


def drafters_of(
    dense: DresdStore, garbage: DresdStore, told: list[list[int]]
) -> dict[str, Callable[[], Drafter]]:
    rest = RestDrafter(make_index([told[1:]], 512), STRATEGIES["backoff"])
    others: list[Drafter] = [RequestDrafter(512), rest, RecyclingDrafter(512)]
    return {
        "dresd": dense.drafter,
        "deep": lambda: dense.drafter("deep"),
        "garbage": garbage.drafter,
        "noise": lambda: Deafened(dense.drafter()),
        "all": lambda: Mixture([*others, dense.drafter()]),
        "two stores": lambda: Mixture([dense.drafter(), garbage.drafter()]),
    }


NAMES = ("dresd", "deep", "garbage", "noise", "all", "two stores")


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_no_dense_drafter_changes_a_story(
    data: Path, told: list[list[int]], dense: DresdStore, garbage: DresdStore, name: str
) -> None:
    model, drafter, tally = stories(data), drafters_of(dense, garbage, told)[name](), Tally()
    for story in (0, 1):  # the second is in the store
        ids = story_ids(data, STORIES[story])
        output, steps = live(model, drafter, ids, 60)
        assert output == told[story][ids.shape[1] : ids.shape[1] + 60]
        for step in steps:
            tally.add(step)
    assert tally.drafted > 50
    if name in ("dresd", "all"):
        assert tally.accepted_length > 1.5
        assert tally.acceptance_rate == tally.accepted / tally.drafted > 0.02


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_story(
    data: Path, told: list[list[int]], dense: DresdStore, garbage: DresdStore, name: str
) -> None:
    model: Any = stories(data)
    ids, drafter = story_ids(data), drafters_of(dense, garbage, told)[name]()
    options: dict[str, Any] = {"max_new_tokens": 50, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    torch.manual_seed(4)
    truth = model.generate(ids, **options)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    found = generate(model, ids, drafter=drafter, **options)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, truth)
    assert torch.equal(torch.get_rng_state(), state), "as many draws as plain sampling makes"


# --- replays ---


def live(model: Any, drafter: Drafter, ids: torch.Tensor, count: int) -> tuple[list[int], list[Step]]:
    """Decode with drafts: the output, and the passes after the prefill."""
    steps: list[Step] = []
    output = generate(
        model, ids, drafter=drafter, budget=32, do_sample=False, max_new_tokens=count, on_step=steps.append
    )
    assert isinstance(output, torch.Tensor)
    return output[0, ids.shape[1] :].tolist(), steps[1:]


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES[:3] + NAMES[5:])
def test_a_replay_is_what_live_decoding_was(
    data: Path, told: list[list[int]], dense: DresdStore, garbage: DresdStore, name: str
) -> None:
    model, drafter = stories(data), drafters_of(dense, garbage, told)[name]()
    recordings, tally = [], Tally()
    for story in STORIES:
        ids = story_ids(data, story)
        output, steps = live(model, drafter, ids, 70)
        recordings.append(Recording(story, ids[0].numpy().astype(np.int32), np.array(output, np.int32)))
        for step in steps:
            tally.add(step)
    result = replay(drafter, with_states(model, recordings), budget=32)
    assert (result.passes, result.tokens) == (tally.passes, tally.tokens)
    assert result.accepted == tally.accepted > 0
    assert result.accepted_length == tally.accepted_length
    assert result.nodes >= tally.drafted, "decoding live cuts what would go beyond the end"


def test_recordings_get_the_states_that_predicted_their_outputs() -> None:
    model = tiny(vocab_size=VOCAB)
    random = np.random.default_rng(0)
    texts = [random.integers(0, VOCAB, size).astype(np.int32) for size in random.integers(2, 60, 40)]
    cuts = [int(random.integers(0, len(text))) for text in texts]
    rows = [
        Recording(str(i), text[:cut], text[cut:])
        for i, (text, cut) in enumerate(zip(texts, cuts, strict=True))
    ]
    rows += [Recording("nothing said", texts[0], texts[0][:0]), Recording("one", texts[0][:0], texts[0][:1])]
    found = list(with_states(model, iter(rows)))
    assert [row.id for row in found] == [row.id for row in rows]
    assert found[-2].hidden is None
    assert found[-1].hidden is None
    for row, text, cut in zip(found, texts, cuts, strict=False):
        expected = states_of(model, text.tolist())
        assert row.hidden is not None
        assert row.hidden.shape == (len(text) - cut, 32)
        if cut:
            np.testing.assert_allclose(row.hidden, expected[cut - 1 : -1], rtol=1e-4, atol=1e-4)
        else:
            assert np.isnan(row.hidden[0]).all()
            np.testing.assert_allclose(row.hidden[1:], expected[:-1], rtol=1e-4, atol=1e-4)

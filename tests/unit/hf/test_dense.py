"""Decoding with dense stores: the states that drafters are told, the same text as without, and replays as live."""

import gc
import weakref
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
from draftstore.drafting.projection import Projection
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError
from draftstore.hf import generate, projecting
from draftstore.hf.graphs import GraphForward
from draftstore.hf.passes import Pass, Wants
from draftstore.hf.projecting import project
from draftstore.hf.recorded import with_states
from draftstore.hf.states import last_states
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
    ((_, states),) = last_states(model, [np.array(ids)])
    return states


# --- the projection ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_states_are_projected_as_float32(dtype: torch.dtype) -> None:
    projection = make_projection(hidden_size=32, dims=8)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = Pass(torch.zeros(3, 5), Wants(), hidden)
    for row in range(3):
        found, plain = rows.hidden(row, projection), rows.hidden(row)
        assert found is not None
        assert plain is not None
        assert found.dtype == np.float32
        assert (found.shape, plain.shape) == ((8,), (32,))
        np.testing.assert_allclose(found, projection.apply(plain), rtol=1e-5, atol=1e-5)


def test_many_states_at_once() -> None:
    projection = make_projection(hidden_size=32, dims=8)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    found = project(projection, states)
    assert found.shape == (2, 5, 8)
    np.testing.assert_allclose(found, projection.apply(states.numpy()), rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_so() -> None:
    projection = make_projection(hidden_size=4, dims=2)
    for bad in (np.nan, np.inf):
        found = project(projection, torch.tensor([0.0, bad, 0.0, 0.0]))
        assert not found.isfinite().any()


def test_weights_are_moved_once_and_go_with_the_projection() -> None:
    projection = make_projection(hidden_size=4, dims=2)
    with torch.inference_mode():
        project(projection, torch.zeros(4))
    kept = projecting._KEPT[projection][torch.device("cpu")]
    state = torch.zeros(4, requires_grad=True)
    torch.autograd.grad(project(projection, state).sum(), state)  # no tensors for inference alone
    assert projecting._KEPT[projection][torch.device("cpu")] is kept
    gone = weakref.ref(projection)
    del projection
    gc.collect()
    assert gone() is None


def test_states_of_another_size_are_refused() -> None:
    with pytest.raises(
        DecodingError, match=r"have 6 numbers, .* the store have 4: use a store .* this model"
    ):
        project(make_projection(hidden_size=4, dims=2), torch.zeros(6))


# --- what sessions are told ---


class Listening(Prophet):
    """A prophet that notes the states that it is told, each with the length of the text then."""

    needs_hidden = True

    def __init__(self, texts: Sequence[Sequence[int]], projection: Projection | None) -> None:
        super().__init__(VOCAB, texts, error_rate=0.3)
        self.projection = projection
        self.told: list[tuple[int, NDArray[np.float32] | None]] = []

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
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
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        super().observe(accepted_ids, tree=tree)
        self.told.append((len(self.text), hidden))


WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "trees": ("llama", {}, {}),
    "static": ("llama", {}, {"cache_implementation": "static"}),
    "eager": ("qwen3", {"attention": "eager"}, {}),
    "chains": ("mistral", {"sliding_window": 8}, {}),
    "graphs": ("llama", {}, {"cache_implementation": "static", "forward": GraphForward}),
    "no positions of its own": ("gpt2", {}, {}),
}


@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_session_is_told_the_state_that_predicted_the_last_token(way: str, projected: bool) -> None:
    architecture, changes, options = WAYS[way]
    check_states(tiny(architecture, vocab_size=VOCAB, **changes), projected, **options)


@needs_gpu
@pytest.mark.parametrize("projected", [True, False])
def test_a_session_is_told_so_by_a_gpu(projected: bool) -> None:
    model: Any = torch.nn.Module.to(build(vocab_size=VOCAB, dtype=torch.float32), "cuda")
    for forward in (GraphForward, None):
        check_states(model, projected, cache_implementation="static", forward=forward)


def test_threads_are_told_the_states_of_their_own_texts() -> None:
    model = tiny(vocab_size=VOCAB)
    prompts = [torch.tensor([[start, start + 2, start + 5]]) for start in range(12)]
    with ThreadPoolExecutor(3) as pool:
        for checked in [pool.submit(check_states, model, True, prompt) for prompt in prompts]:
            checked.result()


def test_threads_with_models_and_drafters_of_their_own_do_not_mix_them_up() -> None:
    """Two models with hidden states of other sizes at once, each with drafters that want them projected or whole."""
    models = [tiny(vocab_size=VOCAB), tiny("qwen3", vocab_size=VOCAB, hidden_size=24)]
    prompts = [torch.tensor([[start, start + 2, start + 5]]) for start in range(3)]
    cases = [
        (model, projected, prompt) for prompt in prompts for model in models for projected in (True, False)
    ]
    with ThreadPoolExecutor(4) as pool:
        for checked in [pool.submit(check_states, *case) for case in cases]:
            checked.result()


def check_states(model: Any, projected: bool, prompt: torch.Tensor = PROMPT, **options: Any) -> None:
    """Decode, and compare the states that were told with those of the whole text."""
    projection = make_projection(hidden_size=states_of(model, [1, 2]).shape[1]) if projected else None
    prompt = prompt.to(model.device)
    text = model.generate(prompt, do_sample=False, max_new_tokens=30)[0].tolist()
    drafter = Listening([[*text, *range(8)]], projection)
    output = generate(model, prompt, drafter=drafter, do_sample=False, max_new_tokens=30, **options)
    assert isinstance(output, torch.Tensor)
    assert output[0].tolist() == text
    states = states_of(model, text)
    assert 3 < len(drafter.told) < 30
    for length, hidden in drafter.told:
        expected = states[length - 2] if projection is None else projection.apply(states[length - 2])
        assert hidden is not None
        np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-4)


def test_a_drafter_of_another_model_is_refused_at_the_prefill() -> None:
    drafter = Listening([[1]], make_projection(hidden_size=31))
    with pytest.raises(DecodingError, match="have 32 numbers, those of the store have 31"):
        generate(tiny(vocab_size=VOCAB), PROMPT, drafter=drafter, max_new_tokens=4)


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
    states = dict(last_states(stories(data), [np.array(story) for story in told]))
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
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
    ) -> ContextSession:
        return DeafenedSession(self, prompt_ids, hidden)


class DeafenedSession(ContextSession):
    count = 0

    def observe(
        self, accepted_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **feedback: Any
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
        "two spaces": lambda: Mixture([dense.drafter(), garbage.drafter()]),
        "two in one": lambda: Mixture([dense.drafter(), dense.drafter("deep"), *others]),
    }


NAMES = ("dresd", "deep", "garbage", "noise", "all", "two spaces", "two in one")
FORWARDS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "graphs": {"cache_implementation": "static", "forward": GraphForward},
}


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_no_dense_drafter_changes_a_story(
    data: Path, told: list[list[int]], dense: DresdStore, garbage: DresdStore, name: str
) -> None:
    model, drafter, tally = stories(data), drafters_of(dense, garbage, told)[name](), Tally()
    for options in FORWARDS.values():
        for story in (0, 1):  # the second is in the store
            steps: list[Step] = []
            ids = story_ids(data, STORIES[story])
            found = generate(
                model,
                ids,
                drafter=drafter,
                do_sample=False,
                max_new_tokens=60,
                on_step=steps.append,
                **options,
            )
            assert isinstance(found, torch.Tensor)
            assert found[0].tolist() == told[story][: ids.shape[1] + 60]
            for step in steps[1:]:
                tally.add(step)
    assert tally.drafted > 100
    if name in ("dresd", "all", "two in one"):
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
@pytest.mark.parametrize("name", NAMES[:3] + NAMES[5:6])
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

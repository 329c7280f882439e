"""Draws of whole passes: texts, errors and random numbers are those of drawing node by node, with one wait.

The oracle walks one tree after the other and calls `torch.multinomial` at each visited node, as plain `generate` does
for each token. `test_matrix` shows the same for whole texts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from draftstore.decoding.acceptance import accept
from draftstore.decoding.budget import Fixed
from draftstore.errors import DecodingError, ProbabilityError
from draftstore.hf import generate, sampling
from draftstore.hf.batches import Batch
from draftstore.hf.members import prepare_text
from draftstore.hf.sampling import OF_SCORES, Draws, Sampler, together
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import Prophet, Prophets
from tests.fakes.hf_models import STORIES, needs_gpu, on_a_gpu, stories, story_ids, tiny
from tests.unit.trees.test_tree import trees

CPU = torch.device("cpu")
SETTINGS: list[Any] = [
    TemperatureLogitsWarper(0.7),
    TemperatureLogitsWarper(1.3),
    TopKLogitsWarper(3),
    TopPLogitsWarper(0.8),
    MinPLogitsWarper(0.1),
    TypicalLogitsWarper(0.7),
    EpsilonLogitsWarper(0.02),
    InfNanRemoveLogitsProcessor(),
    LogitNormalization(),
    TemperatureLogitsWarper(1e-39),
]
LIKELY = [0, 0, 0, 1]
"""The ids of trees; the model says them about as often."""


@pytest.fixture(autouse=True, scope="module")
def queues() -> Iterator[None]:
    """Draw as on a GPU: there is none here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "has_queue", lambda _device: True)
        yield


class Case(NamedTuple):
    """A text in a pass.

    Attributes:
        tree: its draft.
        settings: numbers of its processors.
        seed: of its generator.
        last: tokens after which it ends.
        broken: its row without finite logits, if it has so many.
        fill: what that row is filled with.
    """

    tree: DraftTree
    settings: tuple[int, ...]
    seed: int
    last: int
    broken: int
    fill: float


cases = st.builds(
    Case,
    trees(12, ids=st.sampled_from(LIKELY)),
    st.just((0, 2))
    | st.sampled_from([(), (0,), (0, 2), (1, 3), (0, 2, 3), (4,), (1, 5), (6, 8), (7,), (9,)]),
    st.integers(0, 99),
    st.sampled_from([1, 2, 3, 99, 99, 99]),
    st.sampled_from([0, 1, 2, *[99] * 6]),
    st.sampled_from([torch.nan, torch.inf, -torch.inf]),
)


class Emitted(NamedTuple):
    """What a text emits: tokens, accepted nodes and kind of error; and where its generator is left."""

    tokens: list[int]
    path: list[int]
    error: type[Exception] | None
    state: bytes


def processors_of(case: Case) -> LogitsProcessorList:
    return LogitsProcessorList([SETTINGS[each] for each in case.settings])


def sampler_of(case: Case, generator: torch.Generator | None) -> Sampler:
    return Sampler.of(processors_of(case), generator, CPU)


def emitted(case: Case, choose: Any) -> tuple[list[int], list[int], type[Exception] | None]:
    """Walk a tree until the text ends or fails."""
    tokens: list[int] = []

    def noted(row: int, before: Sequence[int]) -> int:
        tokens.append(choose(row, before))
        return tokens[-1]

    try:
        path = accept(case.tree, noted, lambda before: len(before) == case.last).path
    except (DecodingError, ProbabilityError) as error:
        return tokens, [], type(error)
    return tokens, path, None


def by_node(case: Case, logits: torch.Tensor, generator: torch.Generator) -> Emitted:
    """Return the same, drawing node by node from the text's logits, [nodes + 1, vocabulary]."""

    def choose(row: int, _before: Sequence[int]) -> int:
        raw = logits[row : row + 1].float()
        ids: Any = torch.zeros(1, 4, dtype=torch.int64)
        probs = processors_of(case)(ids, raw).softmax(-1)
        if probs.isnan().any():
            raise DecodingError if raw.softmax(-1).isnan().any() else ProbabilityError
        return int(torch.multinomial(probs, 1, generator=generator))

    found = emitted(case, choose)
    return Emitted(*found, generator.get_state().numpy().tobytes())


def draws_of(texts: Sequence[Case], logits: torch.Tensor, rows: int, samplers: Any) -> Draws:
    batch = DraftBatch.of([(*each, 0, 0) for each in map(parts_of, texts)])
    return Draws(logits, np.arange(len(texts)) * rows, *batch[:2], batch.sizes, samplers)


def parts_of(case: Case) -> Any:
    return case.tree.tokens, case.tree.parents, case.tree.levels


def logits_of(
    texts: Sequence[Case], rows: int, vocab: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return [texts x rows, vocabulary], whose first two ids are likely; some rows are broken."""
    random = np.random.default_rng([vocab, rows, *[text.seed for text in texts]])
    logits = torch.from_numpy(random.normal(0, 1, (len(texts), rows, vocab)))
    logits[:, :, 0] += 4 + np.log(vocab)
    logits[:, :, 1] += 2 + np.log(vocab)
    for own, text in zip(logits, texts, strict=True):
        own[text.broken : text.broken + 1, :2] = text.fill
        if text.fill == -torch.inf:
            own[text.broken : text.broken + 1] = text.fill
    return logits.flatten(0, 1).to(dtype)


@given(
    st.integers(1, 6).flatmap(lambda size: st.lists(cases, min_size=size, max_size=size)),
    st.sampled_from([5, 48, 1_003]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_draws_are_those_of_node_by_node(
    texts: list[Case], vocab: int, dtype: torch.dtype, default: bool
) -> None:
    """The first text may draw from torch's own generator."""
    rows = 1 + max(len(text.tree) for text in texts)
    logits = logits_of(texts, rows, vocab, dtype)
    before = torch.get_rng_state()
    expected = [
        by_node(text, logits[place * rows :], torch.Generator().manual_seed(text.seed))
        for place, text in enumerate(texts)
    ]
    with torch.random.fork_rng():
        torch.manual_seed(texts[0].seed)
        own: list[Any] = [torch.Generator().manual_seed(text.seed) for text in texts]
        own[:1] = [None] if default else own[:1]
        samplers = [sampler_of(text, each) for text, each in zip(texts, own, strict=True)]
        assert list(together(samplers)) == [*range(len(texts))]
        draws = draws_of(texts, logits, rows, samplers)
        for place, (text, true) in enumerate(zip(texts, expected, strict=True)):
            found = emitted(text, choose_from(draws, place))
            draws.settle(place, len(found[0]))
            state = samplers[place].generator.get_state().numpy().tobytes()
            assert Emitted(*found, state) == true
    assert torch.equal(torch.get_rng_state(), before)


def choose_from(draws: Draws, place: int) -> Any:
    """Return the choices of a text from its tokens."""

    def choose(_row: int, before: Sequence[int]) -> int:
        tokens = draws.tokens(place)
        if len(before) == len(tokens):
            raise draws.fault(place)
        return tokens[len(before)]

    return choose


@given(st.integers(0, 99), st.sampled_from([31, 1_003, 32_000]))
def test_a_row_gets_the_same_scores_among_others(seed: int, vocab: int) -> None:
    """Each of the processors of scores, one after another in any order, and softmax: bit for bit."""
    random = np.random.default_rng([seed, vocab])
    raw = torch.from_numpy(random.normal(0, 3, (7, vocab)).astype(np.float32)).round(
        decimals=int(random.integers(6))
    )
    chosen = [SETTINGS[each] for each in random.permutation(len(SETTINGS) - 1)[:3]]
    assert {type(each) for each in SETTINGS} == set(OF_SCORES)

    def probs(rows: torch.Tensor) -> torch.Tensor:
        for processor in chosen:
            rows = processor(None, rows)
        return rows.softmax(-1)

    whole = probs(raw.clone())
    for place in range(len(raw)):
        assert torch.equal(whole[place : place + 1], probs(raw[place : place + 1].clone()))


def test_only_processors_of_scores_and_generators_of_one_text_are_drawn_together() -> None:
    def sampler(*processors: Any, generator: torch.Generator | None = None) -> Sampler:
        return Sampler.of(LogitsProcessorList(processors), generator or torch.Generator(), CPU)

    class Own(TopKLogitsWarper):
        """Might do anything."""

    looks = [
        RepetitionPenaltyLogitsProcessor(1.1),
        NoRepeatNGramLogitsProcessor(2),
        EtaLogitsWarper(0.1),
        Own(3),
    ]
    for each in looks:
        assert together([sampler(each), sampler(SETTINGS[0], each)]) == {}
    odd: Any = TopKLogitsWarper(3)
    odd.top_k = torch.tensor(3)
    assert sampler(odd).recipe is None
    assert sampler(TopKLogitsWarper(3)).recipe == sampler(TopKLogitsWarper(3)).recipe
    assert sampler(TopKLogitsWarper(3)).recipe != sampler(TopKLogitsWarper(4)).recipe
    shared = torch.Generator()
    texts = [
        sampler(generator=shared),
        None,
        sampler(generator=torch.default_generator),
        sampler(looks[0], generator=shared),
        sampler(),
    ]
    assert [*together(texts)] == [2, 4]
    assert [*together([*texts, Sampler.of([], None, CPU)])] == [4]


def test_a_text_without_probabilities_fails_alone() -> None:
    """From the third pass on, the second text's logits are not finite at drafted nodes."""
    model: Any = tiny(vocab_size=48)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0}
    prompts, truths = torch.tensor([[9, 10, 11], [12, 13, 14]]), []
    for seed, prompt in enumerate(prompts):
        torch.manual_seed(seed)
        truths.append(model.generate(prompt[None], **options)[0].tolist())
    passes: list[int] = []

    def breaking(_head: Any, _inputs: Any, logits: torch.Tensor) -> None:
        passes.append(1)
        if len(passes) > 3:
            logits[1:, 1:] = torch.nan

    batch, members = Batch(model), []
    for seed, prompt in enumerate(prompts):
        random = torch.Generator().manual_seed(seed)
        member = prepare_text(model, prompt[None], random=random, **options)
        members.append(member.draft(Prophet(48, truths, depth=2), Fixed(12)))
        batch.join(members[-1])
    handle, errors = model.lm_head.register_forward_hook(breaking), []
    while len(batch):
        errors += [(each, result) for each, result in batch.step() if isinstance(result, Exception)]
    handle.remove()
    ((failed, error),) = errors
    assert failed is members[1]
    assert "another dtype" in str(error)
    found = [member.text.ids.tolist() for member in members]
    assert found[0] == truths[0]
    assert found[1] == truths[1][: len(found[1])]
    assert 4 < len(found[1]) < len(truths[1])


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that make the host wait for a GPU because they read values."""

    READS = (
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.nonzero,
        torch.ops.aten.masked_select,
        torch.ops.aten.multinomial,
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in self.READS
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts copies to the host."""

    COPIES = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__array__)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.COPIES
        return func(*args, **(kwargs or {}))


def texts_of(count: int, nodes: int) -> list[Case]:
    """Return texts with one chain of likely nodes and different processors."""
    parents = np.arange(-1, nodes - 1, dtype=np.int16)
    chain = DraftTree(np.zeros(nodes, np.int32), parents, np.zeros(nodes, np.uint8))
    settings = [(), (0, 2, 3), (4,), (1, 5, 6, 7, 8)]
    return [Case(chain, settings[seed % 4], seed, 99, 99, 0) for seed in range(count)]


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("nodes", [0, 3, 20])
def test_a_pass_has_one_copy_and_no_other_wait(count: int, nodes: int) -> None:
    texts = texts_of(count, nodes)
    logits = logits_of(texts, 1 + nodes, 48)
    samplers = [sampler_of(text, torch.Generator()) for text in texts]
    with Waits() as waits, Copies() as copies:
        draws = draws_of(texts, logits, 1 + nodes, samplers)
        assert (waits.count, copies.count) == (0, 0)
        for place in range(count):
            draws.settle(place, len(draws.tokens(place)))
    assert (waits.count, copies.count) == (0, 1)


def test_a_wait_would_be_noticed() -> None:
    with Waits() as waits, Copies() as copies:
        values = torch.ones(3)
        assert torch.multinomial(values, 1).cpu() is not None
        assert values[0] > 0
    assert (waits.count, copies.count) == (2, 1)


@needs_gpu
def test_a_gpu_is_not_waited_for() -> None:
    texts = texts_of(8, 3)
    logits = logits_of(texts, 4, 1_003).to("cuda")
    samplers = [Sampler.of(processors_of(text), torch.Generator("cuda"), logits.device) for text in texts]
    assert draws_of(texts, logits, 4, samplers).tokens(0), "once before, since libraries wait when they begin"
    torch.cuda.set_sync_debug_mode("error")
    try:
        draws = draws_of(texts, logits, 4, samplers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(draws.tokens(place) for place in range(len(texts)))


@needs_gpu
def test_a_gpu_draws_what_plain_generate_draws(data: Path) -> None:
    """The texts of seeds, each from its own generator, and one from torch's, which is left at the same offset."""
    options: dict[str, Any] = {
        "do_sample": True,
        "top_k": 9,
        "top_p": 0.9,
        "temperature": 0.9,
        "max_new_tokens": 40,
    }
    with on_a_gpu(stories(data)) as model:
        prompt, own = story_ids(data).to("cuda"), torch.cuda.default_generators[0]
        truths, offsets = [], []
        for seed in range(len(STORIES)):
            torch.manual_seed(seed)
            truths.append(model.generate(prompt, **options)[0].tolist())
            offsets.append(own.get_offset())
        drafter = Prophets(512, truths, error_rate=0.3)
        for seed, truth in enumerate(truths):
            torch.manual_seed(seed)
            assert generate(model, prompt, drafter=drafter, **options)[0].tolist() == truth
            assert own.get_offset() == offsets[seed]
        found: Any = generate(
            model, prompt.expand(len(truths), -1), drafter=drafter, seeds=range(len(truths)), **options
        )
        assert [row[: len(truth)] for row, truth in zip(found.tolist(), truths, strict=True)] == truths

"""Texts of a batch, each one object: its ids, choice of tokens, end and drafts, exactly as in plain `generate`.

`prepare_texts` makes them from the arguments of `model.generate`, which transformers prepares as for plain `generate`.
"""

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerationMixin

from draftstore.decoding.acceptance import Acceptance, accept, check_tree
from draftstore.decoding.budget import Planner
from draftstore.decoding.loop import Text
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.slots import Slots, SlotSession, start
from draftstore.errors import DecodingError
from draftstore.hf.checks import NO_LIMIT, check_request, depth_limit, vocab_size
from draftstore.hf.passes import Rows, Wants
from draftstore.hf.sampling import Draws, Sampler, fault_of
from draftstore.recycling.prompts import PromptCandidates
from draftstore.trees.tree import DraftTree

SPARE = 256
"""Spare room after a text in tokens, in addition to a quarter of its length."""
Test = Callable[[int, int], bool]
"""`test(length, token)`: whether the text ends at this token and length."""
DROPPED = ("tokenizer", "assistant_model", "streamer")
_CHOICE = "_extract_generation_mode_kwargs"
OURS = __name__.rpartition(".")[0]
"""The package of the custom functions that get all arguments."""


class Ids:
    """The ids of a growing text: the prompt with its padding, and the emitted tokens."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        """Start from a prompt, int [1, length]."""
        self._buffer: NDArray[np.int32] = np.empty(0, np.int32)
        self._size, self._device = 0, input_ids.device
        self.extend(input_ids[0].cpu().numpy())

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> NDArray[np.int32]:
        """The text, int32 [any]: a view, which stays as it is while the text grows."""
        return self._buffer[: self._size]

    def extend(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Append emitted tokens."""
        begin, self._size = self._size, self._size + len(tokens)
        if self._size > len(self._buffer):
            self._buffer = np.resize(self._buffer, self._size + self._size // 4 + SPARE)
        self._buffer[begin : self._size] = tokens

    def tensor(self, emitted: Sequence[int] = ()) -> torch.Tensor:
        """Return int64 [1, length], the text followed by `emitted`, on the device of the prompt."""
        return torch.from_numpy(np.append(self.ids, np.asarray(emitted, np.int64)))[None].to(self._device)


class Member(Text):
    """A text of a batch; its drafts respect the limits of pool, positions and text.

    Attributes:
        text: its ids, with the padding of the prompt.
        prompt: int64 [any], its prompt without padding.
        past: number of its tokens in the pool.
        wants: outputs needed from its passes.
        max_length: maximum tokens, including prompt and padding; None if there is no limit.
        sampler: how its tokens are drawn; None if they are not.
        greedy: whether a token is the argmax of the raw logits, which a pass computes for all rows at once.
        scores: [1, vocabulary] for every emitted token, after the processors; None if not requested.
        logits: the same before the processors.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: Any,
        criteria: Any,
        config: GenerationConfig,
        *,
        attention_mask: torch.Tensor | None = None,
        streamer: Any = None,
        random: torch.Generator | None = None,
    ) -> None:
        """Prepare a text from arguments for one prompt, as prepared by `generate`; `draft` configures its drafts."""
        self.text = Ids(input_ids)
        self._processors, self._random, self._sample = processors, random, bool(config.do_sample)
        collects = bool(config.return_dict_in_generate)
        self.scores: tuple[torch.Tensor, ...] | None = () if collects and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if collects and config.output_logits else None
        collects = self.scores is not None or self.logits is not None
        self.greedy = not self._sample and not collects and len(processors) == 0
        self.sampler = Sampler.of(processors, random, input_ids.device) if self._sample else None
        if self.sampler is not None and collects:
            self.sampler = self.sampler._replace(recipe=None)
        self.prompt = np.array(self.text.ids, np.int64)
        if attention_mask is not None and attention_mask.dim() == 2:
            self.prompt = self.prompt[attention_mask[0, -len(self.prompt) :].cpu().numpy() != 0]
        self.past = 0
        self.max_length: int | None = criteria.max_length
        known = [(criterion, _test_of(criterion)) for criterion in criteria]
        self._tests = [test for _, test in known if test is not None]
        self._criteria = StoppingCriteriaList([criterion for criterion, test in known if test is None])
        self._streamer = streamer
        self._drafter: Drafter | None = None
        self._prompt_candidates: PromptCandidates | None = None

    def draft(self, drafter: Drafter | None, planner: Planner, min_prob: float = 0.0) -> "Member":
        """Configure drafting, None decodes without; return the member. The planner is copied."""
        self._drafter, self.planner, self.min_prob = drafter, copy.copy(planner), min_prob
        return self

    def choose(self, logits: torch.Tensor, emitted: Sequence[int]) -> int:
        """Return the token that the model emits, by the same steps in the same order as plain `generate`.

        `logits`, [1, vocabulary], are raw; `emitted` are the earlier tokens of this step.
        """
        ids = self.text.tensor(emitted)
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self._processors(ids, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if not self._sample:
            return int(torch.argmax(scores, dim=-1))
        probs = torch.nn.functional.softmax(scores, dim=-1)
        if probs[0, 0].isnan():  # then all are; sampling from them would crash a GPU
            raise fault_of(logits)
        return int(torch.multinomial(probs, num_samples=1, generator=self._random))

    def ends(self, emitted: Sequence[int]) -> bool:
        """Return True if the text ends with the last emitted token, and stream that token."""
        length, token = len(self.text) + len(emitted), emitted[-1]
        self.over = any(test(length, token) for test in self._tests)
        if self._criteria:  # called in any case, since some have state
            self.over |= bool(self._criteria(self.text.tensor(emitted), self.scores).all())
        if self._streamer is not None:
            self._streamer.put(torch.tensor(emitted[-1:]))
        return self.over

    @property
    def gathers(self) -> bool:
        """Whether its drafter needs candidates of the whole prompt."""
        return bool(getattr(self._drafter, "needs_candidates", False))

    def prompt_candidates(self, vocab_size: int) -> PromptCandidates | None:
        """Return the object that gathers candidates from the prompt; the same one until the prompt is read."""
        if self.past == 0 and self.gathers:
            self._prompt_candidates = PromptCandidates(self.prompt, vocab_size)
        return self._prompt_candidates

    @property
    def first_wants(self) -> Wants:
        """The outputs needed at the end of the prompt."""
        drafting = self._drafter is not None
        return Wants(self.greedy, drafting, drafting)

    def begin(self, rows: Rows, model: Any, room: Callable[[], int], slots: Slots) -> Acceptance:
        """Emit the first token, from the outputs at the end of the prompt, and start the drafts unless it is the last.

        `room` returns the maximum nodes of a draft, `slots` are those of the batch.
        """
        verdict = ModelVerdict(rows, self)
        accepted = accept(DraftTree.empty(), verdict.choose, self.ends)
        self.text.extend(accepted.tokens)
        if not self.over:
            self.session = self._session(verdict, slots)
            self.planner.begin()
            self.wants = Wants(self.greedy, self.session.needs_candidates, self.session.needs_hidden)
            self._room, self._vocab_size, self._depth_limit = room, vocab_size(model), depth_limit(model)
        self._prompt_candidates = None
        return accepted

    def _session(self, verdict: "ModelVerdict", slots: Slots) -> SlotSession:
        ids = np.append(self.prompt, self.text.ids[-1]).astype(np.int32)
        if self._drafter is None:
            return start(None, ids, slots=slots)
        candidates = verdict.candidates()
        if self._prompt_candidates is not None:
            candidates = self._prompt_candidates.rows(candidates)
        return start(self._drafter, ids, slots=slots, hidden=verdict.hidden(0), candidates=candidates)

    def keep(self, accepted: Acceptance | None) -> list[int]:
        """Append accepted tokens; return the rows of the pass to keep."""
        if accepted is None:
            return []
        self.text.extend(accepted.tokens)
        self.past += len(accepted.tokens)
        return [0, *(node + 1 for node in accepted.path)]

    def _depth(self) -> int:
        """Return the maximum depth of a draft now: nodes that could not be emitted are not verified."""
        most = self.max_length
        left = NO_LIMIT if most is None else most - len(self.text) - 1
        return max(0, min(left, self._depth_limit(self.past)))

    def budget(self) -> int:
        """Return the maximum nodes of a draft now."""
        return 0 if self._depth() == 0 else max(0, min(self._room(), super().budget()))

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return a draft within the limits; DecodingError if a token is not in the model's vocabulary."""
        if len(tree) == 0:
            return tree
        check_tree(tree)  # kernels and masks follow its parents
        if not 0 <= int(tree.tokens.min()) <= int(tree.tokens.max()) < self._vocab_size:
            wrong = next(token for token in tree.tokens.tolist() if not 0 <= token < self._vocab_size)
            raise DecodingError(
                f"the drafter proposes token {wrong}, expected an id of the model's vocabulary, below "
                f"{self._vocab_size:,}: use a store that was built with the model's own tokenizer"
            )
        tree = tree.down_to(self._depth())
        return tree if len(tree) <= self._room() else tree.prefix(self._room())


class ModelVerdict:
    """The model's outputs for a text's tree: a `draftstore.decoding.loop.Verdict`."""

    def __init__(self, rows: Rows, member: Member, draws: Draws | None = None, place: int = 0) -> None:
        """Hold the outputs of a text; with `draws`, its tokens are drawn: those at `place`."""
        self._rows, self._member, self._draws, self._place = rows, member, draws, place
        self._used = 0
        self._best: list[int] | None = None
        self.candidates, self.hidden = rows.candidates, rows.hidden

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the token that the model emits at a row."""
        if self._draws is not None:
            tokens, self._used = self._draws.tokens(self._place), len(emitted)
            if self._used == len(tokens):
                raise self._draws.fault(self._place)
            self._used += 1
            return tokens[self._used - 1]
        if not self._member.greedy:
            return self._member.choose(self._rows.logits(row), emitted)
        if self._best is None:
            self._best = self._rows.best()
        return self._best[row]

    def settle(self) -> None:
        """Undo draws that were not chosen."""
        if self._draws is not None:
            self._draws.settle(self._place, self._used)


def _test_of(criterion: Any) -> Test | None:
    """Return a criterion as a test without tensors; None if it needs tensors or is of another class."""
    if type(criterion) is MaxLengthCriteria:
        return lambda length, _token: length >= criterion.max_length
    if type(criterion) is EosTokenCriteria:
        ends = frozenset(criterion.eos_token_id.flatten().tolist())
        return lambda _length, token: token in ends
    if type(criterion) is MaxTimeCriteria:
        deadline = criterion.initial_timestamp + criterion.max_time
        return lambda _length, _token: time.time() > deadline
    return None


def prepare_texts(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    streamer: Any = None,
    sources: Sequence[torch.Generator | None] = (None,),
    **model_kwargs: Any,
) -> list[Member]:
    """Return prepared prompts as texts, each with its source of random numbers; DecodingError as `check_request`."""
    check_request(model, generation_config, model_kwargs, len(input_ids))
    mask = model_kwargs.get("attention_mask")
    return [
        Member(
            input_ids[row : row + 1],
            _of_row(logits_processor, row),
            stopping_criteria,
            generation_config,
            attention_mask=None if mask is None else mask[row : row + 1],
            streamer=streamer,
            random=random,
        )
        for row, random in zip(range(len(input_ids)), sources, strict=True)
    ]


def _of_row(processors: Any, row: int) -> Any:
    """Return logits processors with the length of one text's own padding, of those for all texts."""
    found = copy.copy(processors)
    for place, each in enumerate(processors):
        if isinstance(ignored := getattr(each, "prompt_ignore_length", None), torch.Tensor) and ignored.ndim:
            found[place] = copy.copy(each)
            found[place].prompt_ignore_length = ignored[row : row + 1]
    return found


def prepare_text(
    model: Any, inputs: torch.Tensor, *, random: torch.Generator | None = None, **arguments: Any
) -> Member:
    """Prepare one text for a batch as plain `generate` would, without generating anything."""
    found: list[Member] = []

    def prepared(*positional: Any, **named: Any) -> torch.Tensor:
        found.extend(prepare_texts(*positional, sources=[random], **named))
        return inputs

    model.generate(inputs, custom_generate=prepared, **arguments)
    return found[0]


def _handing_over(usual: Any) -> Any:
    """Return transformers' choice of the arguments of a custom function, with those it drops for functions of ours."""
    signature = inspect.signature(usual)

    def extract(*positional: Any, **named: Any) -> Any:
        arguments = signature.bind(*positional, **named).arguments
        arguments["tokenizer"] = arguments.get("kwargs", {}).get("tokenizer")
        found, function = usual(*positional, **named), arguments.get("custom_generate")
        whole = getattr(function, "func", function)  # of a partial one
        if str(getattr(whole, "__module__", "")).startswith(OURS):
            found |= {name: arguments[name] for name in DROPPED if arguments.get(name) is not None}
        return found

    return extract


# transformers passes a streamer to its own functions alone, so that whoever reads from it would wait for ever.
if hasattr(GenerationMixin, _CHOICE):
    setattr(GenerationMixin, _CHOICE, _handing_over(getattr(GenerationMixin, _CHOICE)))

"""Texts of a batch, each one object: its ids, choice of tokens, end and drafts, exactly as in plain `generate`.

`prepare_texts` makes them from the arguments of `model.generate`, which transformers prepares as for plain `generate`.
"""

import copy
import inspect
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

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

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.budget import Planner
from draftstore.decoding.loop import Text
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.slots import Slots, SlotSession, start
from draftstore.hf.checks import NO_LIMIT, check_request, depth_limit, vocab_size
from draftstore.hf.passes import Rows, Wants
from draftstore.hf.sampling import Sampler, fault_of
from draftstore.recycling.prompts import PromptCandidates

SPARE = 256
"""Spare room after a text in tokens, in addition to a quarter of its length."""
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

    @property
    def last(self) -> int:
        """The last id."""
        return int(self._buffer[self._size - 1])

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
        self._limits, self._criteria = _limits_of(criteria)
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
        """Return True if the text ends with the last emitted token."""
        self.over = self._limits.passed(len(self.text) + len(emitted), emitted[-1:])
        if self._criteria:  # called in any case, since some have state; before the streamer
            self.over |= bool(self._criteria(self.text.tensor(emitted), self.scores).all())
            self._stream(emitted[-1:])
        return self.over

    def ends_after(self, emitted: Sequence[int]) -> int:
        """Return how many tokens belong to the text; see `Text`."""
        if self._criteria or self._limits.passed(len(self.text) + len(emitted), emitted):
            return super().ends_after(emitted)
        return len(emitted)

    def show(self, tokens: Sequence[int]) -> None:
        """Stream the tokens of a step, unless criteria of any kind had to see them streamed."""
        if not self._criteria:
            self._stream(tokens)

    def _stream(self, tokens: Sequence[int]) -> None:
        for token in tokens if self._streamer is not None else ():
            self._streamer.put(torch.tensor([token]))

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

    def begin(self, rows: Rows, model: Any, slots: Slots) -> Acceptance:
        """Emit the first token, from the outputs at the end of the prompt, and start the drafts unless it is the last.

        `slots` are those of the batch.
        """
        token = self.first_token(rows)
        accepted = Acceptance([], np.array([token], np.int32))
        self.ends([token])
        self.show([token])
        self.text.extend(accepted.tokens)
        if not self.over:
            self.planner.begin()
            self.session = self._session(rows, slots)
            self.wants = Wants(self.greedy, self.session.needs_candidates, self.session.needs_hidden)
            self.vocab_size, self._depth_limit = vocab_size(model), depth_limit(model)
        self._prompt_candidates = None
        return accepted

    def first_token(self, rows: Rows) -> int:
        """Return the token that the model emits at the end of the prompt."""
        return rows.best()[0] if self.greedy else self.choose(rows.logits(0), ())

    def _session(self, rows: Rows, slots: Slots) -> SlotSession:
        ids = np.append(self.prompt, self.text.ids[-1]).astype(np.int32)
        if self._drafter is None:
            return start(None, ids, slots=slots)
        candidates = rows.candidates()
        if self._prompt_candidates is not None:
            candidates = self._prompt_candidates.rows(candidates)
        return start(self._drafter, ids, slots=slots, hidden=rows.hidden(0), candidates=candidates)

    def keep(self, accepted: Acceptance | None) -> list[int]:
        """Append accepted tokens; return the rows of the pass to keep."""
        if accepted is None:
            return []
        self.text.extend(accepted.tokens)
        self.past += len(accepted.tokens)
        return [0, *(node + 1 for node in accepted.path)]

    def depth(self) -> int:
        """Return the maximum depth of a draft now: nodes that could not be emitted are not verified."""
        most = self.max_length
        left = NO_LIMIT if most is None else most - len(self.text) - 1
        return max(0, min(left, self._depth_limit(self.past)))


class _Limits(NamedTuple):
    """What ends a text, without tensors; see `_limits_of`."""

    longest: int
    ends: frozenset[int]
    deadline: float

    def passed(self, length: int, tokens: Sequence[int]) -> bool:
        """Return whether a text of this length has ended at one of its last tokens."""
        return (
            length >= self.longest
            or not self.ends.isdisjoint(tokens)
            or (self.deadline < math.inf and time.time() > self.deadline)
        )


def _limits_of(criteria: Any) -> tuple[_Limits, StoppingCriteriaList]:
    """Return stopping criteria as limits, and those that need tensors or are of another class."""
    longest, ends, deadline, others = NO_LIMIT, frozenset[int](), math.inf, []
    for each in criteria:
        if type(each) is MaxLengthCriteria:
            longest = min(longest, each.max_length)
        elif type(each) is EosTokenCriteria:
            ends |= frozenset(each.eos_token_id.flatten().tolist())
        elif type(each) is MaxTimeCriteria:
            deadline = min(deadline, each.initial_timestamp + each.max_time)
        else:
            others.append(each)
    return _Limits(longest, ends, deadline), StoppingCriteriaList(others)


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

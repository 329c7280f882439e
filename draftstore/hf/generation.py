"""Generation with drafts: what plain `generate` returns, in fewer forward passes.

    from draftstore.hf import generate, speculative_generate

    generate(model, **inputs, drafter=drafter, max_new_tokens=200)
    model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter, max_new_tokens=200)

The second form is what the first one calls; `streamer=` and `stop_strings=` work in the first alone, for transformers
gives neither streamer nor tokenizer to a function of one's own.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftstore.acceptance import accept
from draftstore.decoding import Fixed, Planner, Step, decode
from draftstore.drafter import Drafter, Session
from draftstore.errors import DecodingError
from draftstore.hf.caches import memory_of
from draftstore.hf.checks import NO_LIMIT, check_request, depth_limit, takes_trees
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.limits import Limited
from draftstore.hf.masks import masks_by_model
from draftstore.hf.stopping import Stops
from draftstore.hf.targets import (
    ChainForward,
    Forward,
    ModelTarget,
    ModelVerdict,
    Prefilled,
    TreeForward,
    Wants,
    last_hidden,
    rows_of,
)
from draftstore.tree import DraftTree

ForwardFactory = Callable[[Prefilled], Forward]


class NoDrafts:
    """The session of decoding without a drafter."""

    needs_candidates = False
    needs_hidden = False

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return no draft."""
        return DraftTree.empty()

    def observe(self, accepted_ids: Any, **told: Any) -> None:
        """Take nothing in."""


@torch.no_grad()
def speculative_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | None = None,
    budget: int = 64,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    token_streamer: Any = None,
    on_step: Callable[[Step], None] | None = None,
    forward: ForwardFactory | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generate with drafts, as `model.generate(..., custom_generate=speculative_generate, drafter=...)`.

    The output is that of plain `generate`: greedy token by token, and sampled with the same seed too, but for
    rounding, which differs between passes over one row and over many.

    Args:
        model: a causal language model of transformers 5.
        input_ids: int64 [1, length], the prompt.
        logits_processor: as `generate` prepares them, like the next two.
        stopping_criteria: likewise.
        generation_config: likewise.
        drafter: proposes drafts; None decodes without.
        budget: most nodes of a draft, without a planner.
        planner: chooses how much of a draft is verified.
        min_prob: least probability of a drafted node.
        token_streamer: gets the prompt and every token, as `streamer` in plain `generate`.
        on_step: called after the prefill, as a step with an empty tree, and after every pass. What it raises ends
            generation; the cache then holds all tokens but the last of that step.
        forward: runs the passes, see `draftstore.hf.targets`; by default what suits model and cache.
        model_kwargs: what the model is called with.

    Returns:
        int64 [1, length], prompt and output, or with `return_dict_in_generate` what plain generate returns.

    Raises:
        DecodingError: drafts cannot serve this way of generating: several texts, beams, encoder-decoder models, linear
            attention, no cache or one that cannot go back, attentions as an output.
    """
    check_request(model, input_ids, generation_config, model_kwargs, drafting=drafter is not None)
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    run = _Run(model, input_ids, logits_processor, stopping_criteria, generation_config, token_streamer)
    planner = (planner or Fixed(budget)) if drafter is not None else Fixed(0)
    steps = run.steps(model_kwargs, drafter, planner, min_prob, forward or default_forward)
    with masks_by_model(model, model_kwargs["past_key_values"]), closing(steps):
        for step in steps:
            if on_step is not None:
                on_step(step)
    if token_streamer is not None:
        token_streamer.end()
    return run.result()


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    drafter: Drafter | None = None,
    budget: int = 64,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    on_step: Callable[[Step], None] | None = None,
    forward: ForwardFactory | None = None,
    **generate_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Call `model.generate` with drafts; every argument of it works as usual.

    Args:
        model: a causal language model of transformers 5.
        inputs: int64 [1, length], the prompt; or `input_ids=`.
        drafter: see `speculative_generate`, like the next three.
        budget: likewise.
        planner: likewise.
        min_prob: likewise.
        streamer: gets the prompt and every token.
        tokenizer: of transformers, for `stop_strings`.
        stop_strings: end the text where they are complete.
        on_step: see `speculative_generate`.
        forward: likewise.
        generate_kwargs: of `model.generate`.

    Raises:
        DecodingError: see `speculative_generate`; or there is an `assistant_model`.
        ValueError: stop strings without a tokenizer, and whatever `model.generate` refuses.
    """
    if generate_kwargs.get("assistant_model") is not None:
        raise DecodingError(
            "an assistant_model drafts in plain generate, expected none: drafts come from the drafter here"
        )
    generate_kwargs["stopping_criteria"] = _with_stop_strings(model, tokenizer, stop_strings, generate_kwargs)
    output: torch.Tensor | GenerateDecoderOnlyOutput = model.generate(
        inputs,
        custom_generate=speculative_generate,
        drafter=drafter,
        budget=budget,
        planner=planner,
        min_prob=min_prob,
        token_streamer=streamer,
        on_step=on_step,
        forward=forward,
        **generate_kwargs,
    )
    return output


def _with_stop_strings(
    model: Any, tokenizer: Any, stop_strings: str | Sequence[str] | None, generate_kwargs: dict[str, Any]
) -> StoppingCriteriaList:
    """Return the stopping criteria of a request and, if there are any, that of its stop strings.

    Raises:
        ValueError: stop strings without a tokenizer.
    """
    criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
    if stop_strings is None:
        for config in (generate_kwargs.get("generation_config"), model.generation_config):
            if config is not None and config.stop_strings is not None:
                stop_strings = config.stop_strings
                generate_kwargs["stop_strings"] = None  # or transformers looks for the tokenizer itself
                break
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer: give it as tokenizer=")
        strings = stop_strings if isinstance(stop_strings, str) else list(stop_strings)
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return criteria


def default_forward(prefilled: Prefilled) -> Forward:
    """Return how the passes of a text are run: as CUDA graphs, over trees, or over chains, what can be had first."""
    if prefilled.model.device.type == "cuda":
        from draftstore.hf.graphs import graph_forward

        if (forward := graph_forward(prefilled)) is not None:
            return forward
    trees = takes_trees(prefilled.model, prefilled.memory, prefilled.model_kwargs)
    return TreeForward(prefilled) if trees else ChainForward(prefilled)


class _Run:
    """One call of `speculative_generate`."""

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        processors: Any,
        criteria: Any,
        config: GenerationConfig,
        streamer: Any,
    ) -> None:
        collects = bool(config.return_dict_in_generate)
        self._model = model
        self._input_ids = input_ids
        self._config = config
        self._streamer = streamer
        self._text = Text(input_ids)
        self._chooser = Chooser(
            self._text,
            processors,
            sample=bool(config.do_sample),
            scores=collects and bool(config.output_scores),
            logits=collects and bool(config.output_logits),
            layers=collects and bool(config.output_hidden_states),
        )
        self._stops = Stops(criteria, self._text, self._chooser)
        self._kwargs: dict[str, Any] = {}
        self._over = False

    def steps(
        self,
        model_kwargs: dict[str, Any],
        drafter: Drafter | None,
        planner: Planner,
        min_prob: float,
        factory: ForwardFactory,
    ) -> Generator[Step, None, None]:
        """Yield the prefill as a step, then those of decoding."""
        step, verdict = self._prefill(model_kwargs, drafter is not None)
        yield step
        if self._over:
            return
        session: Session = NoDrafts()
        if drafter is not None:
            session = drafter.session(
                self._known_ids(), hidden=verdict.hidden(0), candidates=verdict.candidates()
            )
        del verdict  # it holds what the prefill computed
        memory = memory_of(self._kwargs["past_key_values"], drafter is not None)
        prefilled = Prefilled(self._model, memory, self._kwargs, self._text)
        forward = factory(prefilled)
        target = ModelTarget(forward, self._chooser, self._text, vocab_size(self._model))
        target.ask(candidates=session.needs_candidates, hidden=session.needs_hidden)
        limited = Limited(planner, nodes=forward.room, depth=self._depth(), chain=not forward.trees)
        try:
            with self._model._optimize_model_for_decode():
                yield from decode(target, session, planner=limited, ends=self._ends, min_prob=min_prob)
        finally:
            target.close()

    def _prefill(self, model_kwargs: dict[str, Any], drafting: bool) -> tuple[Step, ModelVerdict]:
        """Run the prompt through the model, as plain generate does, and emit the first token."""
        begin = perf_counter_ns()
        with last_hidden(self._model, drafting) as hidden:
            outputs = self._model._prefill(
                self._input_ids,
                self._config,
                model_kwargs,
                is_first_iteration=not self._config.is_assistant,
            )
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, model_kwargs)
        wants = Wants(self._chooser.greedy, drafting, drafting, self._chooser.layers is not None)
        verdict = ModelVerdict(rows_of(outputs, 1, wants, hidden), self._chooser, wants)
        filled = perf_counter_ns()
        accepted = accept(DraftTree.empty(), verdict.choose, self._ends)
        self._text.extend(accepted.tokens.tolist())
        done = perf_counter_ns()
        return Step(DraftTree.empty(), [], accepted.tokens, 0, filled - begin, done - filled), verdict

    def _ends(self, emitted: Sequence[int]) -> bool:
        """Tell whether the text ends with the last emitted token, and stream that token."""
        self._over = self._stops(emitted)
        if self._streamer is not None:
            self._streamer.put(torch.tensor(emitted[-1:]))
        return self._over

    def _known_ids(self) -> NDArray[np.int32]:
        """Return int32 [any], the text without the padding in front."""
        ids = np.array(self._text.ids, np.int32)
        mask = self._kwargs.get("attention_mask")
        return ids if mask is None else ids[mask[0, -len(ids) :].cpu().numpy() != 0]

    def _depth(self) -> Callable[[], int]:
        """Return a function to the depth that a draft may have now: no deeper than what may still be emitted."""
        most = self._stops.max_length
        limit = depth_limit(self._model)
        positions = self._kwargs.get("position_ids")
        shift = 1 if positions is None else len(self._text) - int(positions[..., -1].max())

        def depth() -> int:
            length = len(self._text)
            left = NO_LIMIT if most is None else most - length - 1
            return max(0, min(left, limit(length - shift)))

        return depth

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return what plain generate returns."""
        sequences = self._text.tensor().clone()
        if not self._config.return_dict_in_generate:
            return sequences
        collected: dict[str, Any] = {
            "sequences": sequences,
            "scores": self._chooser.scores,
            "logits": self._chooser.logits,
            "hidden_states": self._chooser.layers,
            "past_key_values": self._kwargs["past_key_values"],
        }
        return GenerateDecoderOnlyOutput(**collected)


def vocab_size(model: Any) -> int:
    """Return how many ids a model knows."""
    return int(model.config.get_text_config(decoder=True).vocab_size)

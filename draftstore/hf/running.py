"""Decoding of one text: prefill as in plain `generate`, then `draftstore.decoding.loop`."""

from collections.abc import Callable, Generator, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftstore.decoding.acceptance import accept
from draftstore.decoding.loop import Planner, Step, decode
from draftstore.decoding.nothing import NoDrafts
from draftstore.drafting.drafter import Drafter, Session, projection_of
from draftstore.hf.caches import rollback_cache
from draftstore.hf.checks import NO_LIMIT, depth_limit
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.limits import Limited
from draftstore.hf.passes import Wants, last_hidden, pass_of
from draftstore.hf.stopping import StopRules
from draftstore.hf.targets import ForwardFactory, ModelTarget, ModelVerdict, Prefilled
from draftstore.trees.tree import DraftTree


class Run:
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
        """Prepare a text; see `speculative_generate` for the arguments."""
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
        self._stops = StopRules(criteria, self._text, self._chooser)
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
        """Yield the prefill as a step, then the decoding steps.

        Args:
            model_kwargs: arguments of the model.
            drafter: None decodes without drafts.
            planner: chooses how much of a draft is verified.
            min_prob: minimum probability of a drafted node.
            factory: creates the object that runs the passes.
        """
        step, verdict = self._prefill(model_kwargs, drafter)
        yield step
        if self._over:
            return
        session: Session = NoDrafts()
        if drafter is not None:
            session = drafter.session(
                self._known_ids(), hidden=verdict.hidden(0), candidates=verdict.candidates()
            )
        del verdict  # frees the prefill's outputs
        memory = rollback_cache(self._kwargs["past_key_values"], drafter is not None)
        prefilled = Prefilled(self._model, memory, self._kwargs, self._text)
        forward = factory(prefilled)
        target = ModelTarget(forward, self._chooser, self._text, vocab_size(self._model))
        target.ask(
            candidates=session.needs_candidates,
            hidden=session.needs_hidden,
            projection=projection_of(session),
        )
        limited = Limited(planner, nodes=forward.room, depth=self._depth(), chain=not forward.trees)
        try:
            with self._model._optimize_model_for_decode():
                yield from decode(target, session, planner=limited, ends=self._ends, min_prob=min_prob)
        finally:
            target.close()

    def _prefill(self, model_kwargs: dict[str, Any], drafter: Drafter | None) -> tuple[Step, ModelVerdict]:
        """Run the prompt through the model as plain generate does, and emit the first token."""
        begin = perf_counter_ns()
        drafting = drafter is not None
        with last_hidden(self._model, drafting) as hidden:
            outputs = self._model._prefill(
                self._input_ids,
                self._config,
                model_kwargs,
                is_first_iteration=not self._config.is_assistant,
            )
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, model_kwargs)
        wants = Wants(self._chooser.greedy, drafting, drafting, self._chooser.layers is not None)
        rows = pass_of(outputs, 1, wants, hidden)
        verdict = ModelVerdict(rows, self._chooser, wants, projection_of(drafter))
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
        """Return int32 [any], the text without left padding."""
        ids = np.array(self._text.ids, np.int32)
        mask = self._kwargs.get("attention_mask")
        return ids if mask is None else ids[mask[0, -len(ids) :].cpu().numpy() != 0]

    def _depth(self) -> Callable[[], int]:
        """Return a function to the maximum depth of a draft now, limited by the tokens still to be emitted."""
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
        """Return the result in the form of plain generate."""
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
    """Return the size of a model's vocabulary."""
    return int(model.config.get_text_config(decoder=True).vocab_size)

"""Decoding of one text: prefill as in plain `generate`, then `draftstore.decoding.loop`."""

from collections.abc import Generator
from time import perf_counter_ns
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftstore.decoding.loop import Planner, Step, decode
from draftstore.drafting.drafter import Drafter, projection_of
from draftstore.hf.caches import rollback_cache
from draftstore.hf.limits import Limited
from draftstore.hf.passes import Wants, last_hidden, pass_of
from draftstore.hf.prompts import PromptCandidates, gathering
from draftstore.hf.targets import ForwardFactory, ModelTarget, ModelVerdict, Prefilled, vocab_size
from draftstore.hf.texts import GeneratedText
from draftstore.trees.tree import DraftTree


class Run:
    """One call of `speculative_generate` for one text."""

    def __init__(
        self, model: Any, input_ids: torch.Tensor, config: GenerationConfig, generated: GeneratedText
    ) -> None:
        """Prepare a text; see `speculative_generate` for the arguments."""
        self._model = model
        self._input_ids = input_ids
        self._config = config
        self._generated = generated
        self._kwargs: dict[str, Any] = {}

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
        text = self._generated
        cached = model_kwargs["past_key_values"].get_seq_length()  # what is read then is the model's affair
        prompt_candidates = None if cached else text.prompt_candidates(drafter, vocab_size(self._model))
        step, verdict = self._prefill(model_kwargs, drafter, prompt_candidates)
        yield step
        if text.over:
            return
        session = text.session(drafter, verdict, prompt_candidates)
        del verdict, prompt_candidates  # frees the prefill's outputs
        memory = rollback_cache(self._kwargs["past_key_values"], drafter is not None)
        prefilled = Prefilled(self._model, memory, self._kwargs, text.text)
        forward = factory(prefilled)
        target = ModelTarget(forward, text.chooser, text.text, vocab_size(self._model))
        target.ask(
            candidates=session.needs_candidates,
            hidden=session.needs_hidden,
            projection=projection_of(session),
        )
        positions = self._kwargs.get("position_ids")
        shift = 1 if positions is None else len(text.text) - int(positions[..., -1].max())
        depth = text.depth(self._model, shift)
        limited = Limited(planner, nodes=forward.room, depth=depth, chain=not forward.trees)
        try:
            with self._model._optimize_model_for_decode():
                yield from decode(target, session, planner=limited, ends=text.ends, min_prob=min_prob)
        finally:
            target.close()

    def _prefill(
        self,
        model_kwargs: dict[str, Any],
        drafter: Drafter | None,
        prompt_candidates: PromptCandidates | None,
    ) -> tuple[Step, ModelVerdict]:
        """Run the prompt through the model as plain generate does, and emit the first token."""
        begin = perf_counter_ns()
        drafting, chooser = drafter is not None, self._generated.chooser
        asked = dict(model_kwargs)
        if prompt_candidates is not None and "logits_to_keep" in asked:
            asked["logits_to_keep"] = 0  # all of them
        with gathering(prompt_candidates, self._model), last_hidden(self._model, drafting) as hidden:
            outputs = self._model._prefill(
                self._input_ids,
                self._config,
                asked,
                is_first_iteration=not self._config.is_assistant,
            )
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, model_kwargs)
        wants = Wants(chooser.greedy, drafting, drafting, chooser.layers is not None)
        verdict = ModelVerdict(pass_of(outputs, 1, wants, hidden), chooser, wants, projection_of(drafter))
        filled = perf_counter_ns()
        accepted = self._generated.begin(verdict)
        done = perf_counter_ns()
        return Step(DraftTree.empty(), [], accepted.tokens, 0, filled - begin, done - filled), verdict

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return the result in the form of plain generate."""
        chooser = self._generated.chooser
        sequences = self._generated.text.tensor().clone()
        if not self._config.return_dict_in_generate:
            return sequences
        collected: dict[str, Any] = {
            "sequences": sequences,
            "scores": chooser.scores,
            "logits": chooser.logits,
            "hidden_states": chooser.layers,
            "past_key_values": self._kwargs["past_key_values"],
        }
        return GenerateDecoderOnlyOutput(**collected)

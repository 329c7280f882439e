"""A model's own generation_config.json: every setting, decoded for requests with and without drafts, as plainly.

What asks for several texts, another search or more than text has no effect on requests; all others do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from draftstore.decoding.budget import Fixed
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.answering import batch_member, generation_arguments
from draftstore.hf.generation import batch_for, check_model, decode_all
from draftstore.hf.loading import LoadedModel
from draftstore.hf.requests import GenerationRequest, Sampling
from tests.fakes.hf_models import stories, stories_tokenizer, story_ids

KEPT: dict[str, Any] = {
    "stop_strings": ["park", " the"],
    "max_time": 100.0,
    "max_length": 9,
    "min_length": 20,
    "min_new_tokens": 12,
    "eos_token_id": [2, 400],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "suppress_tokens": [411, 416, 429],
    "begin_suppress_tokens": [411, 416, 429, 430],
    "bad_words_ids": [[411], [416, 417]],
    "sequence_bias": [[[411], 5.0]],
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.3,
    "encoder_no_repeat_ngram_size": 3,
    "exponential_decay_length_penalty": [4, 1.5],
    "typical_p": 0.7,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "top_h": 0.5,
    "min_p": 0.05,
    "top_k": 7,
    "top_p": 0.8,
    "temperature": 0.7,
    "do_sample": True,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.5},
    "use_cache": False,
    "cache_implementation": "static",
    "prefill_chunk_size": 2,
}
DROPPED: dict[str, Any] = {
    "num_beams": 4,
    "num_return_sequences": 3,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    **dict.fromkeys(("token_healing", "return_dict_in_generate"), True),
    **{f"output_{what}": True for what in ("scores", "logits", "attentions", "hidden_states")},
}
SAMPLED = {
    "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "min_p", "top_k", "top_p", "temperature", "do_sample",
    "renormalize_logits", "num_return_sequences", "stop_strings",
}  # fmt: skip


@contextmanager
def loaded_with(data: Path, **own: Any) -> Iterator[LoadedModel]:
    """Yield the trained model with settings of its own; it stays the same object, which was checked before."""
    text: Any = None
    settings: Any = GenerationConfig(**({"bos_token_id": 1, "eos_token_id": 2} | own))  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stories(data), "generation_config", settings)
        yield LoadedModel(stories(data), stories_tokenizer(data), text)


def answers(loaded: LoadedModel, sampling: Sampling, prompt: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the answer to a request with drafts, and without them."""
    ids = prompt[0].numpy().astype(np.int32)
    request = GenerationRequest(ids, 24, sampling)
    member = batch_member(loaded, request, drafter=RequestDrafter(512), planner=Fixed(16))
    decode_all(batch_for(loaded.model, [member]), [member], lambda _: None)
    torch.manual_seed(sampling.seed or 0)
    model: Any = loaded.model
    arguments = {"attention_mask": torch.ones_like(prompt), "tokenizer": loaded.tokenizer}
    plainly = model.generate(prompt, **arguments, **generation_arguments(loaded, request))
    return member.text.ids[len(ids) :].tolist(), plainly[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", [*KEPT, *DROPPED])
def test_settings_of_its_own(data: Path, name: str) -> None:
    own, temperature = {name: (KEPT | DROPPED)[name]}, 0.9 if name in SAMPLED else 0.0
    if name == "num_return_sequences":
        own["do_sample"] = True  # transformers refuses it otherwise
    prompt, sampling = story_ids(data), Sampling(temperature, seed=3)
    with loaded_with(data) as loaded:
        without, _ = answers(loaded, sampling, prompt)
    with loaded_with(data, **own) as loaded:
        drafted, plainly = answers(loaded, sampling, prompt)
        assert drafted == plainly
        if name in DROPPED:
            assert drafted == without
        elif name in ("suppress_tokens", "stop_strings", "repetition_penalty", "guidance_scale"):
            model: Any = loaded.model
            options = {"max_new_tokens": 24, "pad_token_id": 2, "tokenizer": loaded.tokenizer, "top_k": 0}
            options |= {"do_sample": temperature > 0, "temperature": temperature or None}
            torch.manual_seed(3)
            assert drafted == model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


def test_every_setting_of_transformers_is_in_the_matrix() -> None:
    """A new one that takes part in decoding is decided here: kept or dropped."""
    parts = (
        "assistant", "num_assistant", "speculation", "decoder_", "_", "compile", "cache_config", "max_cache_len",
    )  # fmt: skip
    others = {
        "bos_token_id", "pad_token_id", "transformers_version", "is_assistant", "diversity_penalty", "early_stopping",
        "num_beam_groups", "length_penalty", "constraints", "force_words_ids", "low_memory", "max_matching_ngram_size",
        "max_new_tokens", "target_lookbehind", "token_healing", "disable_compile", "use_mtp",
        "continuous_batching_config", "name_or_path",
    }  # fmt: skip
    settings: Any = GenerationConfig()  # type: ignore[no-untyped-call]
    known = {name for name in vars(settings) if not name.startswith(parts)}
    assert known - others - KEPT.keys() - DROPPED.keys() == set()


@pytest.mark.parametrize(
    ("own", "fault"), [({"stop_strings": ["park"]}, ""), ({"num_beams": 4}, "num_beams is 4, expected 1")]
)
def test_the_check_calls_generate_with_the_models_own_settings(data: Path, own: Any, fault: str) -> None:
    with loaded_with(data, **own) as loaded:
        found = check_model(loaded).fault
    assert fault in found
    assert bool(found) == bool(fault)

"""Conversion of API requests for the decoder: token ids, limits, and the record for the response log."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, counted
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.text.conversation import answer_lead, encode_conversation
from draftstore.text.tokenizer import TextTokenizer
from services.worker.messages import Ask, ChatAsk, CompletionAsk
from services.worker.problems import ApiError
from services.worker.work import Engine, Facts

USUAL_TOKENS = 16
"""Default maximum tokens of a completion, as in OpenAI's API; a chat has no default."""

Record = Callable[[str], Mapping[str, Any]]


def check_model(name: str | None, facts: Facts) -> None:
    """Refuse requests for another model; a request may leave the model out.

    Raises:
        ApiError: the model is not served.
    """
    if name is not None and name != facts.name:
        message = f"the model {name[:200]!r} is not served here: ask for {facts.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def make_request(ask: CompletionAsk | ChatAsk, engine: Engine, most_tokens: int) -> GenerationRequest:
    """Return the generation request.

    Args:
        ask: the API request.
        engine: engine with the model's facts and tokenizer.
        most_tokens: maximum tokens of any answer.

    Raises:
        ApiError: the prompt is invalid for this model, or too long.
    """
    facts, is_chat = engine.facts, isinstance(ask, ChatAsk)
    param, usual = ("messages", most_tokens) if is_chat else ("prompt", USUAL_TOKENS)
    try:
        prompt = _prompt_ids(ask, engine.tokenizer, facts.vocab_size)
    except DraftstoreError as error:
        raise ApiError(400, str(error), param=param) from None
    if not len(prompt):
        raise ApiError(400, "the prompt is empty, and this model needs a token to begin with", param=param)
    room = _room(ask.wanted_tokens, usual, most_tokens, len(prompt), facts, param)
    return GenerationRequest(prompt, room, _sampling(ask, facts))


def _prompt_ids(ask: CompletionAsk | ChatAsk, tokenizer: TextTokenizer, vocab_size: int) -> NDArray[np.int32]:
    """Return a prompt as ids; ids in the request are used as they are.

    Raises:
        ApiError: an id is outside the model's vocabulary.
        TokenizerError: the text is not valid Unicode, or the chat template refuses the conversation.
    """
    if isinstance(ask, ChatAsk):
        return encode_conversation(tokenizer, ask.conversation)
    if isinstance(ask.prompt, str):
        return encode_conversation(tokenizer, ask.prompt)
    wrong = next((token for token in ask.prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        message = f"the token id {str(wrong)[:30]} is outside this model's vocabulary of {vocab_size:,} ids"
        raise ApiError(400, message, param="prompt")
    return np.array(ask.prompt, np.int32)


def _room(wanted: int | None, usual: int, most: int, prompt: int, facts: Facts, param: str) -> int:
    """Return the maximum number of tokens of an answer.

    Raises:
        ApiError: the requested number does not fit.
    """
    rest = facts.positions - prompt
    if rest < 1 or (wanted or 1) > rest:
        asked = f", and {wanted:,} more are wanted for the answer" if wanted else ""
        raise ApiError(
            400,
            f"this model has {facts.positions:,} positions, and the prompt takes {counted(prompt, 'token')}{asked}: "
            "shorten it" + (", or ask for fewer" if wanted and rest > 0 else ""),
            param=param,
            code="context_length_exceeded",
        )
    if wanted is not None and wanted > most:
        raise ApiError(
            400,
            f"{wanted:,} tokens are wanted, this worker writes at most {most:,}: ask for fewer",
            param="max_tokens",
        )
    return min(usual if wanted is None else wanted, rest, most)


def _sampling(ask: Ask, facts: Facts) -> Sampling:
    """Return the sampling settings."""
    return Sampling(
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=None if ask.top_k is None else max(0, ask.top_k),
        min_p=ask.min_p,
        repetition_penalty=ask.repetition_penalty,
        presence=ask.presence_penalty or 0.0,
        frequency=ask.frequency_penalty or 0.0,
        bias=_bias(ask.logit_bias or {}, facts.vocab_size),
        seed=ask.seed,
    )


def _bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """Return the logit bias by token id; JSON keys are strings.

    Raises:
        ApiError: a key is not an id of the model.
    """
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocab_size):
            message = f"logit_bias has the key {key[:30]!r}: expected token ids below {vocab_size:,}"
            raise ApiError(400, message, param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def lead_of(ask: CompletionAsk | ChatAsk, tokenizer: TextTokenizer) -> str:
    """Return a prefix of answers that is not part of them."""
    return answer_lead(tokenizer, ask.conversation) if isinstance(ask, ChatAsk) else ""


def make_record(ask: CompletionAsk | ChatAsk, tokenizer: TextTokenizer, name: str, id_: str) -> Record:
    """Return a function from an answer to its record in the response log."""
    head = {
        "id": id_,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "model": name,
    }
    if isinstance(ask, ChatAsk):
        messages = ask.conversation
        return lambda text: head | {"messages": [*messages, {"role": "assistant", "content": text}]}
    prompt = ask.prompt if isinstance(ask.prompt, str) else _without_bos(ask.prompt, tokenizer)
    return lambda text: head | {"text": prompt + text}


def _without_bos(prompt: list[int], tokenizer: TextTokenizer) -> str:
    """Return the text of ids without BOS, which the tokenizer will add again."""
    bos = tokenizer.bos_ids
    return tokenizer.decode(prompt[len(bos) :] if tuple(prompt[: len(bos)]) == bos else prompt)

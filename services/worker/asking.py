"""Conversion of API requests for the decoder: token ids, limits, and the record for the response log."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, counted
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.text.conversation import Content, answer_lead, encode_conversation
from draftstore.text.tokenizer import TextTokenizer
from services.worker.jobs import Answered
from services.worker.messages import AS_MANY_AS_FIT, Ask, ChatAsk, CompletionAsk, Prompt
from services.worker.problems import ApiError
from services.worker.work import Engine, Facts

USUAL_TOKENS = 16
"""Default maximum tokens of a completion, as in OpenAI's API; a chat has no default."""

Record = Callable[[Answered], Mapping[str, Any]]


def check_model(name: str | None, facts: Facts) -> None:
    """Refuse requests for another model; a request may leave the model out.

    Raises:
        ApiError: the model is not served.
    """
    if name is not None and name != facts.name:
        message = f"the model {name[:200]!r} is not served here: ask for {facts.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def make_requests(
    ask: CompletionAsk | ChatAsk, engine: Engine, *, most_tokens: int, most_choices: int
) -> list[GenerationRequest]:
    """Return one generation request for each answer: `n` for the first prompt, then for the second."""
    each = ask.n or 1
    prompts: Sequence[Content | Prompt] = [ask.conversation] if isinstance(ask, ChatAsk) else ask.prompt
    if len(prompts) * each > most_choices:
        raise ApiError(
            400,
            f"{counted(len(prompts), 'prompt')} with {counted(each, 'answer')} each, this worker gives at most "
            f"{most_choices} answers to a request: send several",
            param="n" if each > 1 else "prompt",
        )
    settings = ask.chat_template_kwargs or {} if isinstance(ask, ChatAsk) else {}
    return [
        request for prompt in prompts for request in _requests_for(prompt, settings, ask, engine, most_tokens)
    ]


def _requests_for(
    prompt: Content | Prompt,
    settings: Mapping[str, Any],
    ask: CompletionAsk | ChatAsk,
    engine: Engine,
    most_tokens: int,
) -> Iterator[GenerationRequest]:
    """Yield the requests for the answers to one prompt; with a seed, each answer has its own."""
    facts, param = engine.facts, "messages" if isinstance(ask, ChatAsk) else "prompt"
    try:
        ids = _prompt_ids(prompt, settings, engine.tokenizer, facts.vocab_size)
    except DraftstoreError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs" if settings else param) from None
    if not len(ids):
        raise ApiError(400, "the prompt is empty, and this model needs a token to begin with", param=param)
    request = GenerationRequest(
        ids,
        _room(ask, most_tokens, len(ids), facts, param),
        _sampling(ask, facts),
        min_tokens=ask.min_tokens or 0,
        ignore_eos=bool(ask.ignore_eos),
        top=ask.top,
        budget=ask.draftstore.budget if ask.draftstore else None,
        prediction=_prediction(ask, engine),
        stop_ids=_known(ask.stop_token_ids or (), "stop_token_ids", facts.vocab_size),
    )
    if request.min_tokens > request.max_tokens:
        raise ApiError(
            400,
            f"min_tokens is {request.min_tokens:,}, and the answer has at most {counted(request.max_tokens, 'token')}: "
            "ask for fewer, or for more max_tokens",
            param="min_tokens",
        )
    for number in range(ask.n or 1):
        seed = None if ask.seed is None else ask.seed + number
        yield dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed))


def _prompt_ids(
    prompt: Content | Prompt, settings: Mapping[str, Any], tokenizer: TextTokenizer, vocab_size: int
) -> NDArray[np.int32]:
    """Return a prompt as ids; ids in the request are used as they are."""
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return np.array(_known(cast(list[int], prompt), "prompt", vocab_size), np.int32)
    ids = encode_conversation(tokenizer, cast(Content, prompt), settings=settings)
    if len(ids) and ids.max() >= vocab_size:  # of a token that the model never learned
        _known(ids.tolist(), "prompt", vocab_size)
    return ids


def _prediction(ask: CompletionAsk | ChatAsk, engine: Engine) -> NDArray[np.int32] | None:
    """Return what is expected to follow the prompt, as far as there are positions for it and the model knows its ids.

    None if nothing is expected.
    """
    if ask.prediction is None:
        return None
    try:
        ids = engine.tokenizer.encode(lead_of(ask, engine.tokenizer) + ask.prediction.content, bos=False)
    except DraftstoreError as error:
        raise ApiError(400, str(error), param="prediction") from None
    return ids[ids < engine.facts.vocab_size][: engine.facts.positions]


def _known(ids: Sequence[int], param: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a parameter."""
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        message = f"the token id {str(wrong)[:30]} is outside this model's vocabulary of {vocab_size:,} ids"
        raise ApiError(400, message, param=param)
    return tuple(ids)


def _room(ask: Ask, most: int, prompt: int, facts: Facts, param: str) -> int:
    """Return the maximum number of tokens of an answer."""
    wanted = None if ask.wanted_tokens == AS_MANY_AS_FIT else ask.wanted_tokens
    usual = most if isinstance(ask, ChatAsk) or ask.wanted_tokens else USUAL_TOKENS
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
    """Return the logit bias by token id; JSON keys are strings."""
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
    created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    each, several = (
        ask.n or 1,
        ask.n not in (None, 1) or (isinstance(ask, CompletionAsk) and len(ask.prompt) > 1),
    )

    def record(answer: Answered) -> Mapping[str, Any]:
        id_of = f"{id_}-{answer.index}" if several else id_
        head = {"id": id_of, "created": created, "model": name}
        if isinstance(ask, ChatAsk):
            return head | {"messages": [*ask.conversation, {"role": "assistant", "content": answer.text}]}
        prompt = ask.prompt[answer.index // each]
        prompt = prompt if isinstance(prompt, str) else _without_bos(prompt, tokenizer)
        return head | {"text": prompt + answer.text}

    return record


def _without_bos(prompt: list[int], tokenizer: TextTokenizer) -> str:
    """Return the text of ids without BOS, which the tokenizer will add again."""
    bos = tokenizer.bos_ids
    return tokenizer.decode(prompt[len(bos) :] if tuple(prompt[: len(bos)]) == bos else prompt)

"""Conversion of request bodies for the decoder: token ids, limits, and records for the response log."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.conversation import Content, answer_lead, encode_conversation
from draftstore.errors import DraftstoreError, counted
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.text.digests import identify
from draftstore.text.records import content_of
from draftstore.text.tokenizer import TextTokenizer
from services.common.http import ProblemError
from services.worker.answers import Answered, Engine, Facts, Terms
from services.worker.bodies import AnyBody, Body, ChatBody, CompletionBody, NamedTool
from services.worker.response_log import as_line
from services.worker.settings import WorkerSettings

USUAL_TOKENS = 16
"""Default maximum tokens of a completion, as in OpenAI's API; a chat has no default."""


def check_model(name: str | None, facts: Facts) -> None:
    """Refuse requests for another model; a request may omit the model."""
    if name is not None and name != facts.name:
        message = f"the model {name[:200]!r} is not served here: ask for {facts.name!r}"
        raise ProblemError(404, message, param="model", code="model_not_found")


def make_requests(body: AnyBody, engine: Engine, settings: WorkerSettings) -> list[GenerationRequest]:
    """Return one generation request for each answer: `n` for the first prompt, then for the second."""
    check_model(body.model, engine.facts)
    if isinstance(body, ChatBody):
        _check_tools(body)
    count, asked = body.n or 1, len(body.prompt) if isinstance(body, CompletionBody) else 1
    if asked * count > settings.max_choices:
        found = f"{counted(asked, 'prompt')} with {counted(count, 'answer')} each"
        message = (
            f"{found}, expected at most {settings.max_choices} answers per request: send several requests"
        )
        raise ProblemError(400, message, param="n" if count > 1 else "prompt")
    sampling, prediction = _sampling(body, engine.facts.vocab_size), _prediction(body, engine)
    stop_ids = _known(body.stop_token_ids or (), "stop_token_ids", engine.facts.vocab_size)
    stop_ids += _special_stops(body, engine.tokenizer)
    requests = []
    for prompt in _prompts(body, engine):
        request = GenerationRequest(
            prompt,
            _room(body, settings.max_tokens, len(prompt), engine.facts),
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            budget=body.draftstore.budget if body.draftstore else None,
            live=body.draftstore is None or body.draftstore.live,
            prediction=prediction,
            stop_ids=stop_ids,
        )
        for number in range(count):  # with a seed, each answer has its own
            seed = None if body.seed is None else body.seed + number
            requests.append(replace(request, sampling=replace(sampling, seed=seed)))
    return requests


def _check_tools(body: ChatBody) -> None:
    names = [tool.function.name for tool in body.tools or []]
    choice = body.tool_choice
    if len({*names}) < len(names):
        raise ProblemError(400, "two tools have the same name", param="tools")
    if choice == "required" and not names:
        raise ProblemError(400, "tools are required by this tool_choice", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = f"no tool of the request is named {choice.function.name[:100]!r}"
        raise ProblemError(400, message, param="tool_choice")
    if "tools" in (body.chat_template_kwargs or {}):
        message = "tools are a parameter of their own: move them there"
        raise ProblemError(400, message, param="chat_template_kwargs")


def make_terms(body: AnyBody, engine: Engine, id_: str, bearer: str) -> Terms:
    """Return what the answers to a request have in common."""
    tools = isinstance(body, ChatBody) and bool(body.callable_tools)
    lead, record = _lead(body, engine.tokenizer), _recorder(body, engine, id_)
    stops = (*body.stop, *engine.facts.stops)
    return Terms(id_, engine.tokenizer, engine.facts.ends, stops, lead, tools, bearer, record)


def _special_stops(body: Body, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the ids of the stop strings that are special tokens, which have no text."""
    special, found = tokenizer.special_texts, []
    for stop in body.stop:
        if stop in special:
            found.append(special[stop])
        elif inside := next((text for text in special if text in stop), None):
            message = f"the stop string {stop!r} contains {inside!r}, a special token, which has no text: name it alone"
            raise ProblemError(400, message, param="stop")
    return tuple(found)


def _prompts(body: AnyBody, engine: Engine) -> list[NDArray[np.int32]]:
    """Return the prompts as ids; ids in the request are used as they are."""
    contents: Sequence[Content | list[int]] = (
        body.prompt if isinstance(body, CompletionBody) else [body.conversation]
    )
    settings, param, found = dict[str, Any](), "prompt", []
    if isinstance(body, ChatBody):
        tools = body.callable_tools
        settings = {**(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        param = "tools" if tools else "chat_template_kwargs" if settings else "messages"
    for content in contents:
        ids = content
        if isinstance(body, ChatBody) or isinstance(content, str):
            try:
                ids = encode_conversation(
                    engine.tokenizer, cast(Content, content), settings=settings
                ).tolist()
            except DraftstoreError as error:
                raise ProblemError(400, str(error), param=param) from None
        if not ids:
            raise ProblemError(400, "the prompt is empty, but this model needs an initial token", param=param)
        found.append(np.array(_known(cast(list[int], ids), param, engine.facts.vocab_size), np.int32))
    return found


def _prediction(body: AnyBody, engine: Engine) -> NDArray[np.int32] | None:
    if body.prediction is None:
        return None
    ids = engine.tokenizer.encode(_lead(body, engine.tokenizer) + body.prediction.content, bos=False)
    return ids[: engine.facts.positions]


def _known(ids: Sequence[int], param: str, vocab_size: int) -> tuple[int, ...]:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        message = f"the token id {str(wrong)[:30]} is outside this model's vocabulary of {vocab_size:,} ids"
        raise ProblemError(400, message, param=param)
    return tuple(ids)


def _room(body: Body, most: int, prompt: int, facts: Facts) -> int:
    asked = body.max_completion_tokens or body.max_tokens
    wanted = None if asked == -1 else asked
    rest = facts.positions - prompt
    if rest < (wanted or 1):
        message = (
            f"prompt ({counted(prompt, 'token')}) plus max_tokens ({wanted or 1:,}) exceeds the context length of "
            f"{facts.positions:,} tokens"
        )
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        raise ProblemError(400, message, param=param, code="context_length_exceeded")
    if wanted and wanted > most:
        message = f"max_tokens ({wanted:,}) exceeds this worker's limit of {most:,} tokens"
        raise ProblemError(400, message, param="max_tokens")
    usual = most if isinstance(body, ChatBody) or asked else USUAL_TOKENS
    room = min(wanted or usual, rest, most)
    if (body.min_tokens or 0) > room:
        message = f"min_tokens ({body.min_tokens:,}) exceeds the maximum answer of {counted(room, 'token')}"
        raise ProblemError(400, message, param="min_tokens")
    return room


def _sampling(body: Body, vocab_size: int) -> Sampling:
    bias = body.logit_bias or {}
    _known(tuple(bias), "logit_bias", vocab_size)
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence=body.presence_penalty or 0.0,
        frequency=body.frequency_penalty or 0.0,
        bias=bias,
    )


def _lead(body: AnyBody, tokenizer: TextTokenizer) -> str:
    return answer_lead(tokenizer, ()) if isinstance(body, ChatBody) else ""


def _recorder(body: AnyBody, engine: Engine, id_: str) -> Callable[[Answered], tuple[bytes, bytes]]:
    created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    head = {"id": id_, "created": created, "model": engine.facts.name}

    def record(answer: Answered) -> tuple[bytes, bytes]:
        named = head | ({"id": f"{id_}-{answer.choice}"} if answer.choice else {})
        line = as_line(named | _content(body, engine.tokenizer, answer))
        return line, identify(content_of(json.loads(line))[1]).document

    return record


def _content(body: AnyBody, tokenizer: TextTokenizer, answer: Answered) -> dict[str, Any]:
    if isinstance(body, ChatBody):
        return {"messages": [*body.conversation, {"role": "assistant", "content": answer.text}]}
    prompt = body.prompt[answer.choice // (body.n or 1)]
    if not isinstance(prompt, str):  # the tokenizer will add BOS again
        bos = tokenizer.bos_ids
        prompt = tokenizer.decode(prompt[len(bos) * (tuple(prompt[: len(bos)]) == bos) :])
    return {"text": prompt + answer.text}

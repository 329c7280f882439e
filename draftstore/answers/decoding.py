"""Decoding of the answers missing from a journal, in batches.

Answers join the batch as room becomes available, longest prompts first. Each answer has its own random numbers, so
neither the batch nor an interruption changes samples, except for rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice

import numpy as np

from draftstore.answers.journal import Journal, StoredAnswer
from draftstore.answers.prompts import Prompt, ResponseOptions
from draftstore.decoding.conversation import answer_lead
from draftstore.decoding.incremental import Pieces
from draftstore.decoding.planners import Fixed
from draftstore.errors import ModelError, counted
from draftstore.hf.answering import batch_member
from draftstore.hf.batches import Batch
from draftstore.hf.loading import LoadedModel
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.storage.progress import OnProgress


def decode_answers(
    options: ResponseOptions,
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    journal: Journal,
    most: int,
    on_progress: OnProgress,
) -> None:
    """Decode answers missing from a journal, at most `most` at once; ModelError if they do not fit into memory."""
    left = [number for number in range(len(prompts)) if number not in journal.answers]
    left.sort(key=lambda number: -len(prompts[number].ids))
    requests = {number: _request(options, prompts[number], number) for number in left}
    decoded = 0
    on_progress(len(journal.answers), len(prompts), counted(decoded, "token"))
    for number, tokens in _together(loaded, requests, most) if requests else ():
        decoded += len(tokens)
        limited = len(tokens) == options.max_tokens
        journal.add(_finish(loaded, prompts[number], number, tokens, limited))
        on_progress(len(journal.answers), len(prompts), counted(decoded, "token"))


def _request(options: ResponseOptions, prompt: Prompt, number: int) -> GenerationRequest:
    seed = int(np.random.SeedSequence((options.seed, number)).generate_state(1, np.uint64)[0])
    sampling = Sampling(options.temperature, options.top_p, seed=seed)
    return GenerationRequest(prompt.ids, options.max_tokens, sampling)


def _together(
    loaded: LoadedModel, requests: dict[int, GenerationRequest], most: int
) -> Iterator[tuple[int, list[int]]]:
    """Decode answers in a batch; yield the number and the tokens of each when it ends."""
    longest = max(len(request.prompt) + request.max_tokens for request in requests.values())
    left, members = iter(requests.items()), {}
    with closing(Batch(loaded.model, most=most)) as batch:
        if longest > batch.positions:
            raise ModelError(
                f"no memory for {batch.most} answers of up to {longest:,} tokens with prompts: decode fewer together"
            )
        while True:
            for number, request in islice(left, batch.most - len(batch)):
                member = batch_member(loaded, request, drafter=None, planner=Fixed(0))
                batch.join(member)
                members[member] = number
            if not members:
                return
            for member, result in batch.step():
                if isinstance(result, Exception):
                    raise result
                if member.over:
                    yield members.pop(member), member.text.ids[len(member.prompt) :].tolist()


def _finish(
    loaded: LoadedModel, prompt: Prompt, number: int, tokens: list[int], limited: bool
) -> StoredAnswer:
    """Return an answer's text: what the ids add to the prompt, without end token and lead-in."""
    ended = tokens[-1] in loaded.ends
    tokens, ended = (tokens[:-1] if ended else tokens), ended or not limited
    pieces = Pieces(loaded.text, prompt.ids)
    text = "".join([pieces.push(token) for token in tokens]) + pieces.finish()
    return StoredAnswer(
        number, text.removeprefix(answer_lead(loaded.text, prompt.content)), len(tokens), ended
    )

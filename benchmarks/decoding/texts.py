"""The texts of the decoding benchmark: prompts, and the stores that drafts come from.

own     AlpacaEval questions. The store holds the model's greedy answers to rephrased questions, as in a service whose
        users ask similar questions and whose response log becomes the store. The measured answers are not in it.
apart   Other AlpacaEval questions, and a store of ShareGPT: text of other models on other subjects.
"""

import hashlib
import json
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import CHAT, SEED, TINY, Workspace, alpaca_questions, write_records
from benchmarks.measure import progress
from draftstore.answers.responses import ResponseOptions, make_responses
from draftstore.hf.loading import LoadedModel
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore

REWORDINGS = (
    "Please {lower}", "{prompt} Please answer in detail.", "Hi! {prompt}", "{prompt} Thanks!",
    "I have a question. {prompt}", "{prompt} Explain step by step.", "Question: {prompt}",
)  # fmt: skip
OWN, APART, SERVING = "own", "apart", "serving"
NGRAMS, QUICK_NGRAMS = 100_000, 2_000


class Text(NamedTuple):
    """One kind of text.

    Attributes:
        prompts: int32 [any] each.
        rest: the store of token sequences.
        crest: the store of precomputed trees, made from it.
    """

    prompts: list[NDArray[np.int32]]
    rest: RestStore
    crest: CrestStore


def make_text(space: Workspace, loaded: LoadedModel, model: Path, args: Namespace, name: str) -> Text:
    """Return a text by name (`OWN` for `SERVING`); answers and stores are made once, in the work folder."""
    questions, chat = _questions(space), TINY if args.quick else CHAT
    chosen = questions[-args.prompts :] if name == APART else questions[: args.prompts]
    corpus = space.inputs(chat) if name == APART else (_own_answers(space, model, chosen, args),)
    progress(f"stores of {corpus[0].stem}")
    rest = space.work / "stores" / f"{corpus[0].stem}-{loaded.text.fingerprint[:8]}"
    ngrams = QUICK_NGRAMS if args.quick else NGRAMS
    crest = rest.with_name(f"{rest.name}-crest-{ngrams}")
    build_rest(RestOptions(corpus=corpus, name=rest.name), loaded.text, rest)
    build_crest(CrestOptions(name=crest.name, ngrams=ngrams), rest, crest)
    encoded = [chat_prompt(loaded, question) for question in chosen]
    return Text(encoded, RestStore.open(rest), CrestStore.open(crest))


def chat_prompt(loaded: LoadedModel, question: str) -> NDArray[np.int32]:
    """Return a question in the model's chat template, int32 [n]."""
    text = loaded.text.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)
    return loaded.text.encode(text, bos=True)


def _questions(space: Workspace) -> list[str]:
    """Return the short prompts of AlpacaEval in a fixed order."""
    short = [
        question
        for question in alpaca_questions(space)
        if 20 <= len(question) <= 200 and "\n" not in question
    ]
    order = np.random.default_rng(SEED).permutation(len(short))
    return [short[place] for place in order]


def _own_answers(space: Workspace, model: Path, questions: list[str], args: Namespace) -> Path:
    """Return a file of the model's answers to rephrased questions."""
    digest = hashlib.sha256(json.dumps([questions, args.tokens, str(model)]).encode()).hexdigest()[:8]
    prompts = space.work / "corpora" / f"own_prompts_{digest}.jsonl"
    if not prompts.exists():
        reworded = [
            each.format(prompt=question, lower=question[0].lower() + question[1:])
            for each in REWORDINGS
            for question in questions
        ]
        write_records(prompts, ({"prompt": [{"role": "user", "content": each}]} for each in reworded))
    progress("the model's own answers")
    out = prompts.with_name(f"own_answers_{digest}.jsonl")
    options = ResponseOptions(prompts=(prompts,), max_tokens=args.tokens)
    return make_responses(options, model, out, dtype="float32", device=args.device, batch=24).path

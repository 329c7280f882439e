"""The texts of the decoding benchmark: prompts, and the stores that drafts come from.

own     The model's earlier answers. AlpacaEval prompts; the store holds its own answers to the same questions in
        other words (`REWORDINGS`, decoded greedily) and nucleus-sampled answers to the questions as they stand. The
        greedy answers that are measured are not in it. So it is with a service whose users ask alike, and whose
        response log becomes the store.
apart   Other AlpacaEval prompts, and a store of ShareGPT conversations: text of other models about other things.
copy    Prompts whose answers repeat parts of them: summaries and questions about given passages (Spec-Bench), and texts
        to be put right. The store is that of `apart`.

Answers for the store are made once, in batches, and kept under --work.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import CHAT, SEED, Source, Workspace, evenly, write_records
from benchmarks.measure import progress
from draftstore.cli.common import count_progress
from draftstore.hf.loading import LoadedModel
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.records import read_json_records

REWORDINGS = (
    "Please {lower}", "{prompt} Please answer in detail.", "Hi! {prompt}", "{prompt} Thanks!",
    "I have a question. {prompt}", "{prompt} Explain step by step.", "Question: {prompt}",
)  # fmt: skip
TEMPERATURE, TOP_P = 0.3, 0.95
BATCH = 24
TINY_CHAT = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)
PUT_RIGHT = "Correct the spelling mistakes in this text, and return the whole text:\n\n{text}"
SUMMARIZE = ("summarization", "rag")
ALPACA, SPEC_BENCH, SHAREGPT = (f"{name}.jsonl.zst" for name in ("alpaca_eval", "spec_bench", "sharegpt"))


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much there is of everything.

    Attributes:
        prompts: of each text.
        tokens: most tokens of an answer.
        samples: sampled answers to each question, in the store of `own`.
        chat: the source of the other store.
        ngrams: of CREST stores.
        longest: most tokens of a prompt.
    """

    prompts: int = 12
    tokens: int = 160
    samples: int = 4
    chat: Source = CHAT
    ngrams: int = 100_000
    longest: int = 700


QUICK = Extent(prompts=2, tokens=16, samples=1, chat=TINY_CHAT, ngrams=2_000, longest=200)


@dataclasses.dataclass(frozen=True)
class Text:
    """One kind of text.

    Attributes:
        name: `own`, `apart` or `copy`.
        prompts: int32 [any] each.
        corpus: files that the stores are built from.
        rest: the store of token sequences.
        crest: the store of precomputed trees, made from it.
    """

    name: str
    prompts: list[NDArray[np.int32]]
    corpus: tuple[Path, ...]
    rest: RestStore
    crest: CrestStore

    def about(self) -> dict[str, Any]:
        """Return its sizes as JSON values."""
        return {
            "prompts": len(self.prompts),
            "prompt_tokens": int(np.median([len(prompt) for prompt in self.prompts])),
            "store": self.rest.manifest.name,
            "store_tokens": self.rest.manifest.counts["tokens"],
            "crest_entries": self.crest.manifest.counts["entries"],
        }


def make_text(space: Workspace, loaded: LoadedModel, name: str, extent: Extent) -> Text:
    """Return a text by its name; stores are built once."""
    corpus: tuple[Path, ...]
    if name == "own":
        questions = _questions(space)[: extent.prompts]
        corpus = (_own_answers(space, loaded, questions, extent),)
        rest, crest = _stores(space, loaded, corpus[0].stem, corpus, extent.ngrams)
        return Text(name, [chat_prompt(loaded, question) for question in questions], corpus, rest, crest)
    corpus = space.inputs(extent.chat)
    rest, crest = _stores(space, loaded, extent.chat.name, corpus, extent.ngrams)
    if name == "apart":
        questions = _questions(space)[-extent.prompts :]
        return Text(name, [chat_prompt(loaded, question) for question in questions], corpus, rest, crest)
    fitting = (chat_prompt(loaded, text) for text in _copying(space))
    prompts = [prompt for prompt in fitting if len(prompt) <= extent.longest]
    return Text(name, evenly(prompts, extent.prompts), corpus, rest, crest)


def chat_prompt(loaded: LoadedModel, question: str) -> NDArray[np.int32]:
    """Return a question in the model's chat template, int32 [n]."""
    text = loaded.text.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)
    return loaded.text.encode(text, bos=True)


def _questions(space: Workspace) -> list[str]:
    """Return the prompts of AlpacaEval in an order that is always the same, short ones alone."""
    records = (record for _, record in read_json_records(space.data / "replays" / ALPACA))
    questions = dict.fromkeys(record["prompt"][0]["content"] for record in records)
    short = [question for question in questions if 20 <= len(question) <= 200 and "\n" not in question]
    order = np.random.default_rng(SEED).permutation(len(short))
    return [short[place] for place in order]


def _copying(space: Workspace) -> Iterator[str]:
    """Yield prompts whose answers repeat parts of them."""
    for _, record in read_json_records(space.data / "replays" / SPEC_BENCH):
        if record["category"] in SUMMARIZE:
            yield record["prompt"][0]["content"]
    for place, (_, record) in enumerate(read_json_records(space.data / "replays" / SHAREGPT)):
        words = record["output"].split()
        if place < 30 and len(words) >= 80 and "```" not in record["output"]:
            yield PUT_RIGHT.format(text=" ".join(words[:80]))


def _stores(
    space: Workspace, loaded: LoadedModel, name: str, files: Sequence[Path], ngrams: int
) -> tuple[RestStore, CrestStore]:
    """Open the two stores of some text; they are built if they are not there yet."""
    rest = (
        space.work / "stores" / f"{name}-{loaded.text.fingerprint[:8]}"
    )  # stores of other tokenizers lie beside
    crest = rest.with_name(f"{rest.name}-crest-{ngrams}")
    progress(f"stores of {name}")
    build_rest(RestOptions(corpus=tuple(files), name=name), loaded.text, rest)
    build_crest(CrestOptions(name=f"{name}-crest", ngrams=ngrams), rest, crest)
    return RestStore.open(rest), CrestStore.open(crest)


def _own_answers(space: Workspace, loaded: LoadedModel, questions: Sequence[str], extent: Extent) -> Path:
    """Return a file of the model's earlier answers; they are made if they are not there yet."""
    recipe = [list(questions), REWORDINGS, extent.tokens, extent.samples, TEMPERATURE, TOP_P, loaded.name]
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:8]
    path = space.work / "corpora" / f"own_answers_{digest}.jsonl"
    if path.exists():
        return path
    asked = [
        reworded.format(prompt=question, lower=question[0].lower() + question[1:])
        for reworded in REWORDINGS
        for question in questions
    ]
    sampled = list(questions) * extent.samples
    with count_progress("answers") as bars:
        task = bars.add_task("answers for the store", total=len(asked) + len(sampled), detail="")

        def done(count: int) -> None:
            bars.advance(task, count)

        answers = _answers(loaded, asked, extent.tokens, {"do_sample": False}, done)
        sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0}
        answers += _answers(loaded, sampled, extent.tokens, sampling, done)
    pairs = zip([*asked, *sampled], answers, strict=True)
    write_records(
        path,
        (
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in pairs
        ),
    )
    return path


def _answers(
    loaded: LoadedModel,
    questions: Sequence[str],
    tokens: int,
    choosing: dict[str, Any],
    done: Callable[[int], None],
) -> list[str]:
    """Answer many questions by plain generate in batches, padded on the left."""
    import torch

    model: Any = loaded.model
    end = model.generation_config.eos_token_id
    answers = []
    torch.manual_seed(SEED)
    for start in range(0, len(questions), BATCH):
        prompts = [chat_prompt(loaded, question) for question in questions[start : start + BATCH]]
        width = max(map(len, prompts))
        ids, mask = np.full((len(prompts), width), end), np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        batch, seen = (torch.from_numpy(array).to(model.device) for array in (ids, mask))
        output = model.generate(
            batch, attention_mask=seen, max_new_tokens=tokens, pad_token_id=end, **choosing
        )
        for row in output[:, width:].tolist():
            kept = row[: row.index(end)] if end in row else row
            answers.append(loaded.text.decode(kept))
        done(len(prompts))
    return answers

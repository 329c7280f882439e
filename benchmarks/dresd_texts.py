"""The texts of the DReSD benchmark: prompts, what others and the model itself answered to them, and what is replayed.

ood     Alpaca instructions with the answers of text-davinci-003: text of another model, out of distribution.
id      The same instructions with the target model's own greedy answers: in distribution.
sampled The model's nucleus samples, three to each of the first instructions.

Replayed are the model's answers to AlpacaEval instructions, which none of the corpora holds, greedy and sampled.
Answers are made once, in batches, and kept under --work.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RecordingSet, Workspace, evenly, write_records
from benchmarks.measure import progress
from draftstore.answers.responses import ResponseOptions, make_responses
from draftstore.cli.common import count_progress
from draftstore.decoding.replay import Recording, read_recordings
from draftstore.hf.loading import LoadedModel
from draftstore.hf.recorded import with_states
from draftstore.text.records import read_json_records

OOD, ID, SAMPLED = "ood", "id", "sampled"
GREEDY, NUCLEUS = "greedy", "nucleus"
INSTRUCTIONS = "chat_instruct_mix.jsonl.zst"
INSTRUCTION_SOURCE = "alpaca_random_9k"
EVALUATED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
TEMPERATURE, TOP_P = 0.7, 0.95
BATCH = 128


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much there is of everything.

    Attributes:
        prompts: instructions that the corpora answer.
        sampled: of them, those that three answers are sampled to.
        tests: instructions whose answers are replayed.
        tokens: most tokens of an answer.
        longest: most tokens of an instruction in the chat template.
        ngrams: of CREST stores.
        live: answers that are decoded live.
    """

    prompts: int = 3500
    sampled: int = 600
    tests: int = 100
    tokens: int = 128
    longest: int = 256
    ngrams: int = 100_000
    live: int = 10


QUICK = Extent(prompts=40, sampled=10, tests=4, tokens=24, ngrams=1_000, live=1)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Files of texts.

    Attributes:
        corpora: by name.
        recordings: what is replayed, by how it was decoded, with hidden states.
    """

    corpora: dict[str, Path]
    recordings: dict[str, list[Recording]]


def make_texts(
    space: Workspace, loaded: LoadedModel, model: Path, extent: Extent, dtype: str, parts: Sequence[str]
) -> Texts:
    """Return all texts; those that are not there yet are made.

    Args:
        space: where they go.
        loaded: the target model.
        model: its folder.
        extent: how many.
        dtype: of the weights that answer for the corpora; what is replayed always comes from float32.
        parts: the corpora that are wanted.
    """
    folder = space.work / "corpora"
    asked = folder / f"dresd_{extent.prompts}.jsonl"
    if not asked.exists():
        write_records(asked, _instructions(space, loaded, extent))
    corpora = {OOD: asked}
    greedy = ResponseOptions((asked,), max_new_tokens=extent.tokens)
    if ID in parts:
        corpora[ID] = _answer(greedy, model, folder / f"dresd_{extent.prompts}_greedy_{dtype}.jsonl", dtype)
    if SAMPLED in parts:
        sampled = dataclasses.replace(_nucleus(greedy), samples=3, limit=extent.sampled)
        corpora[SAMPLED] = _answer(
            sampled, model, folder / f"dresd_{extent.sampled}_nucleus_{dtype}.jsonl", dtype
        )
    tests = folder / f"dresd_tests_{extent.tests}.jsonl"
    if not tests.exists():
        write_records(tests, _tests(space, extent.tests))
    recordings = {}
    plain = dataclasses.replace(greedy, prompts=(tests,))
    for name, options in ((GREEDY, plain), (NUCLEUS, _nucleus(plain))):
        answers = _answer(options, model, tests.with_name(f"{tests.stem}_{name}.jsonl"), "float32")
        recordings[name] = list(with_states(loaded.model, read_recordings(answers, loaded.text)))
    return Texts(corpora, recordings)


def _nucleus(options: ResponseOptions) -> ResponseOptions:
    """Return the same with tokens that are drawn."""
    return dataclasses.replace(options, temperature=TEMPERATURE, top_p=TOP_P)


def _answer(options: ResponseOptions, model: Path, out: Path, dtype: str) -> Path:
    """Return a file of the model's answers; it goes on where an earlier run was interrupted."""
    progress(f"answers {out.name}")
    with count_progress("answers") as bars:
        task = bars.add_task(out.stem, total=None, detail="")

        def on_progress(done: int, total: int, tokens: int) -> None:
            bars.update(task, completed=done, total=total, detail=f"{tokens:,} tokens")

        return make_responses(options, model, out, dtype=dtype, batch=BATCH, on_progress=on_progress).path


def _instructions(space: Workspace, loaded: LoadedModel, extent: Extent) -> list[dict[str, Any]]:
    """Return instructions with their answers by another model, at even distances, none of them twice."""
    found: dict[str, dict[str, Any]] = {}
    for _, record in read_json_records(space.data / "corpora" / INSTRUCTIONS):
        if record["id"].startswith(INSTRUCTION_SOURCE) and len(record["messages"]) == 2:
            found.setdefault(record["messages"][0]["content"], record)
    short = [record for record in found.values() if _length(loaded, record) <= extent.longest]
    return evenly(short, extent.prompts)


def _length(loaded: LoadedModel, record: dict[str, Any]) -> int:
    """Return how many tokens an instruction has in the chat template."""
    text = loaded.text.render_chat(record["messages"][:1], add_generation_prompt=True)
    return len(loaded.text.encode(text, bos=True))


def _tests(space: Workspace, count: int) -> list[dict[str, Any]]:
    """Return AlpacaEval instructions at even distances."""
    records = [record for _, record in read_json_records(space.data / "replays" / EVALUATED.file)]
    chosen = [record for record in records if record["model"] == EVALUATED.model]
    return [{"id": record["id"], "prompt": record["prompt"]} for record in evenly(chosen, count)]

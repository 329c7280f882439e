"""The decoding worker as its clients see it: `python -m benchmarks.serving`.

Clients ask SmolLM2-135M-Instruct all at once, with prompts of AlpacaEval, greedy, as streams. Two workers run, of which
one works at a time: with `--max-batch 1`, and with a batch of as many as there are clients. Each answers without drafts
(the requests say `"draftstore": {"budget": 0}`) and with drafts of the request and of a REST store that holds the
model's earlier answers, the text `own` of `benchmarks.decode_texts`. What is verified is planned by a cost curve, which
is measured first and kept under --work. All ways take turns in every round; ratios are medians over rounds.

Requests that are sent at once do not end at once: those with good drafts leave, and the last one has the model for
itself. So the batch is measured a second time, `steady`: each client asks its next question once it is answered.

An untimed round before the others warms every way up. In it the first way tells how likely its tokens were: an answer
that differs from it is excused where its two most likely tokens lay within 1e-4 of each other.

With --quick it is stories260K in float64, where nothing may differ.

Table first; the last line of stdout is one JSON document, also written to OUT/serving.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.serving --work ~/bench
"""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Workspace, add_arguments, open_workspace
from benchmarks.decode import curve_figures, measure_curve
from benchmarks.decode_texts import QUICK as QUICK_TEXTS
from benchmarks.decode_texts import Extent, make_text
from benchmarks.keeping import decoding_worker, is_ready
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.service import free_port
from benchmarks.serving_clients import Reply, Together, ask_together, likely_tokens, parting_margin
from benchmarks.smollm import add_model_argument, smollm
from draftstore.decoding.curve import CostCurve
from draftstore.hf.loading import load_model

CLIENTS, TOKENS, ROUNDS = 8, 96, 5
QUICK_TOKENS, QUICK_ROUNDS = 24, 1
START_SECONDS = 600.0
"""Time limit for a worker to start, in seconds; kernels may have to be compiled."""
EXCUSED = 1e-4
"""Between log-probabilities."""
GOALS = {"batch_over_single": 2.0, "drafts_over_batch": 1.0, "first_token_of_last": 0.25}
"""At least: tokens/s of the batch over one by one, and with drafts over without. At most: the wait of the last."""


class Way(NamedTuple):
    """A way of serving.

    Attributes:
        name: for tables.
        batched: whether the worker decodes all answers together.
        drafts: whether it drafts.
        questions: of each client, one after the other.
    """

    name: str
    batched: bool
    drafts: bool
    questions: int = 1


WAYS = (
    Way("one by one", batched=False, drafts=False),
    Way("one by one, drafts", batched=False, drafts=True),
    Way("together", batched=True, drafts=False),
    Way("together, drafts", batched=True, drafts=True),
    Way("steady", batched=True, drafts=False, questions=3),
    Way("steady, drafts", batched=True, drafts=True, questions=3),
)
SINGLE, SINGLE_DRAFTS, BATCH, BATCH_DRAFTS, STEADY, STEADY_DRAFTS = (way.name for way in WAYS)


class Asked(NamedTuple):
    """What is served.

    Attributes:
        model: its folder.
        dtype: of its weights.
        prompts: int32 [any] each.
        store: folder of the REST store.
        curve: file of the cost curve.
        about: the text, as JSON values.
    """

    model: Path
    dtype: str
    prompts: list[NDArray[np.int32]]
    store: Path
    curve: Path
    about: dict[str, Any]


def prepare(space: Workspace, args: argparse.Namespace) -> Asked:
    """Make prompts, store and cost curve, unless they are there."""
    import torch

    model, dtype = _model(space, args)
    torch.set_num_threads(args.threads)
    loaded = load_model(model, dtype=dtype, device="cpu")
    texts = QUICK_TEXTS if args.quick else Extent()
    text = make_text(
        space, loaded, "own",
        Extent(args.clients, args.tokens, texts.samples, texts.chat, QUICK_TEXTS.ngrams, texts.longest),
    )  # fmt: skip
    curve = args.curve or space.work / f"curve-{loaded.name}-{dtype}-{args.threads}.json"
    if not curve.exists():
        measure_curve(loaded.model, loaded.name, quick=args.quick).save(curve)
    return Asked(model, dtype, text.prompts, text.rest.path, curve, text.about())


def _model(space: Workspace, args: argparse.Namespace) -> tuple[Path, str]:
    """Return the folder of the model and the type of its weights."""
    if args.quick:
        return space.data / "models" / "stories260K", "float64"
    return smollm(space, args.model), "float32"


def run_ways(
    asked: Asked, work: Path, *, tokens: int, rounds: int, threads: int
) -> dict[str, list[Together]]:
    """Have all ways answer in turns; return their rounds, the untimed one first."""
    with ExitStack() as stack:
        urls = {}
        for batched in (False, True):
            port = free_port()
            most = len(asked.prompts) if batched else 1
            told = (
                "--dtype",
                asked.dtype,
                "--store",
                asked.store,
                "--curve",
                asked.curve,
                "--max-batch",
                most,
            )
            log = work / f"serving-worker-{most}.log"
            worker = stack.enter_context(decoding_worker(asked.model, port, log, *told, threads=threads))
            urls[batched] = f"http://127.0.0.1:{port}"
            worker.wait_for(partial(is_ready, urls[batched]), START_SECONDS)
        done: dict[str, list[Together]] = {way.name: [] for way in WAYS}
        for turn in range(1 + rounds):
            first = turn % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                progress(f"round {turn} of {rounds}: {way.name}")
                drafting = {} if way.drafts else {"draftstore": {"budget": 0}}
                telling = {"logprobs": 2} if way.name == SINGLE and not turn else {}
                settings = {"max_tokens": tokens, "temperature": 0, **drafting, **telling}
                prompts, clients = asked.prompts * way.questions, len(asked.prompts)
                done[way.name].append(ask_together(urls[way.batched], prompts, settings, clients=clients))
    return done


def figures_of(
    done: dict[str, list[Together]], likely: Sequence[Sequence[tuple[int, float]]]
) -> list[dict[str, Any]]:
    """Return the figures of all ways as JSON values.

    Args:
        done: their rounds, the untimed one first.
        likely: of each prompt, see `likely_tokens`.
    """
    rows = []
    for name, (_, *rounds) in done.items():
        waits = [[reply.first for reply in each.replies] for each in rounds]
        rows.append(
            {
                "way": name,
                "tokens": rounds[0].tokens,
                "tokens_per_second": round(median(each.rate for each in rounds), 2),
                "rates": [round(each.rate, 2) for each in rounds],
                "seconds": [round(each.seconds, 3) for each in rounds],
                "first_token_seconds": [round(median(each), 3) for each in zip(*waits, strict=True)],
                "accepted_length": round(rounds[0].accepted_length, 3),
                "drafted_per_pass": round(rounds[0].drafted / max(1, rounds[0].passes), 2),
                "differences": _differences(
                    [reply for each in done[name] for reply in each.replies], done[SINGLE][0].replies, likely
                ),
            }
        )
    return rows


def _differences(
    replies: Sequence[Reply], expected: Sequence[Reply], likely: Sequence[Sequence[tuple[int, float]]]
) -> list[dict[str, Any]]:
    """Return which prompts got another answer than from the first way, each once."""
    found: dict[int, dict[str, Any]] = {}
    for place, reply in enumerate(replies):
        prompt = place % len(expected)
        if reply.text != expected[prompt].text:
            margin = parting_margin(expected[prompt].text, reply.text, likely[prompt])
            found[prompt] = {"prompt": prompt, "margin": margin, "excused": margin <= EXCUSED}
    return list(found.values())


def reached(done: dict[str, list[Together]], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return whether the goals were reached: medians of the ratios of each round."""

    def ratio(name: str, other: str, value: Callable[[Together], float]) -> float:
        pairs = zip(done[name][1:], done[other][1:], strict=True)
        return float(round(median(value(ours) / value(theirs) for ours, theirs in pairs), 3))

    def rate(each: Together) -> float:
        return each.rate

    def wait(each: Together) -> float:
        return each.replies[-1].first

    found = {
        "batch_over_single": ratio(BATCH, SINGLE, rate),
        "drafts_over_batch": ratio(BATCH_DRAFTS, BATCH, rate),
        "drafts_over_single_drafts": ratio(BATCH_DRAFTS, SINGLE_DRAFTS, rate),
        "drafts_over_batch_steady": ratio(STEADY_DRAFTS, STEADY, rate),
        "first_token_of_last": max(ratio(BATCH, SINGLE, wait), ratio(BATCH_DRAFTS, SINGLE_DRAFTS, wait)),
    }
    met = {
        name: found[name] <= goal if name == "first_token_of_last" else found[name] >= goal
        for name, goal in GOALS.items()
    }
    same = all(difference["excused"] for row in rows for difference in row["differences"])
    return {"ratios": found, "goals": GOALS, "reached": met, "lossless": same}


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print the table."""
    columns = ("way", "tokens/s", "first token, first", "last", "longest", "tokens a pass", "nodes", "differ")
    show_table(
        title,
        columns,
        [
            (
                row["way"], row["tokens_per_second"], row["first_token_seconds"][0], row["first_token_seconds"][-1],
                max(row["first_token_seconds"]), row["accepted_length"], row["drafted_per_pass"],
                len(row["differences"]),
            )
            for row in rows
        ],
    )  # fmt: skip


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    add_arguments(parser)
    add_model_argument(parser)
    parser.add_argument(
        "--clients", type=int, default=CLIENTS, help="requests at once (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, help=f"of an answer at most (default: {TOKENS})")
    parser.add_argument("--rounds", type=int, help=f"timed (default: {ROUNDS})")
    parser.add_argument("--curve", type=Path, help="a cost curve of `draftstore tune` (default: measured)")
    parser.add_argument("--threads", type=int, help="of a worker (default: one for each core)")
    args = parser.parse_args(arguments)
    args.threads = args.threads or (1 if args.quick else len(os.sched_getaffinity(0)))
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all ways, and finish with the JSON document."""
    args = parse_arguments(arguments)
    about = describe_machine(["torch", "transformers"]) | {"quick": args.quick}
    with open_workspace(args) as space:
        asked = prepare(space, args)
        before = os.getloadavg()[0]
        done = run_ways(asked, space.work, tokens=args.tokens, rounds=args.rounds, threads=args.threads)
        rows = figures_of(done, [likely_tokens(reply) for reply in done[SINGLE][0].replies])
        loads = {"load_average": [round(each, 2) for each in (before, os.getloadavg()[0])]}
        show(rows, f"{len(asked.prompts)} requests at once, at most {args.tokens} tokens each")
        figures = {
            "text": asked.about,
            "clients": args.clients,
            "most_tokens": args.tokens,
            "rounds": args.rounds,
        }
        figures |= {"curve": curve_figures(CostCurve.load(asked.curve)), "ways": rows, **loads}
        finish(args.out, "serving", about | figures | reached(done, rows))


if __name__ == "__main__":
    main()

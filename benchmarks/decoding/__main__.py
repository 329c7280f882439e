"""Decoding with drafts measured, in a loop and served: `python -m benchmarks.decoding`.

SmolLM2-135M-Instruct in float32 answers AlpacaEval prompts with greedy decoding. The size of drafts is planned with the
cost curve, which is measured first.

own, apart   two kinds of text (`benchmarks.decoding.texts`): plain `generate`, our loop without drafts, and with drafts
             from the request, Token Recycling, REST, CREST, and from REST, recycling and request in one tree. Modes
             alternate from prompt to prompt; speed is the median over rounds. Every output is compared with plain
             `generate`: it may diverge only where the two largest logits are within 1e-4.
serving      clients of the decoding worker, one per prompt, send requests at the same time, then each repeats after its
             answer. Answers are decoded one by one and batched, without drafts and with those from the request and the
             store of `own`. Answers that differ from those of the first mode are counted; rounding explains a few.

With --quick, the model is stories260K in float64, where nothing may differ. Tables first; the last line of stdout is
one JSON document, also written to OUT/decoding.json. Exit status 1 if an output differs for another reason.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.decoding --work ~/bench
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.decoding --work ~/bench --parts serving --rounds 3
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.common import Workspace, add_arguments, chosen, open_workspace
from benchmarks.decoding.serving import measure_serving
from benchmarks.decoding.texts import APART, OWN, SERVING, Text, make_text
from benchmarks.decoding.ways import LOOP, PLAIN, Answers, Way, answer, differences
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_rows
from benchmarks.smollm import add_model_argument, smollm
from draftstore.decoding.budget import CostPlanner, Fixed, Planner
from draftstore.decoding.curve import CostCurve
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.loading import LoadedModel, load_model
from draftstore.hf.tuning import measure
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.trees.frontier import BUDGET

PROMPTS, TOKENS, ROUNDS = 12, 160, 3
QUICK_PROMPTS, QUICK_TOKENS, QUICK_ROUNDS, QUICK_NODES = 2, 16, 1, 16


def ways_of(vocab_size: int, text: Text, planner: Planner) -> list[Way]:
    """Return the modes of decoding a text, plain `generate` first."""
    drafters: dict[str, Callable[[], Drafter]] = {
        "request": lambda: RequestDrafter(vocab_size),
        "Token Recycling": lambda: RecyclingDrafter(vocab_size),
        "REST": text.rest.drafter,
        "CREST": text.crest.drafter,
        "REST, Token Recycling and request": lambda: Mixture(
            [RequestDrafter(vocab_size), text.rest.drafter(), RecyclingDrafter(vocab_size)]
        ),
    }
    return [PLAIN, LOOP, *(Way(name, each, planner) for name, each in drafters.items())]


def measure_text(
    loaded: LoadedModel, text: Text, ways: Sequence[Way], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Answer all prompts in all modes, alternating, and return the figures of each mode."""
    model: Any = loaded.model
    for way in ways:
        answer(model, text.prompts[:1], way, tokens, Answers())  # compiles, takes memory
    done: dict[str, list[Answers]] = {way.name: [] for way in ways}
    for turn in range(rounds):
        progress(f"round {turn + 1} of {rounds}")
        drafters = {way.name: way.drafter() if way.drafter else None for way in ways}
        for way in ways:
            done[way.name].append(Answers())
        for place, prompt in enumerate(text.prompts):
            first = (place + turn) % len(ways)
            for way in (*ways[first:], *ways[:first]):
                answer(model, [prompt], way, tokens, done[way.name][-1], drafters[way.name])
    rows = []
    for name, answers in done.items():
        expected = done[PLAIN.name]
        pairs = [(one.seconds, other.seconds) for one, other in zip(expected, answers, strict=True)]
        rows.append(
            {
                "way": name,
                "over_plain": round(median(plain / own for plain, own in pairs), 3),
                **answers[0].figures(),
                "differences": differences(model, text.prompts, expected[0], answers[0]),
            }
        )
    return rows


def run(args: argparse.Namespace, space: Workspace, parts: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run the parts; return their figures, and the number of outputs whose difference rounding does not explain."""
    torch.set_num_threads(args.threads)
    model = space.data / "models" / "stories260K" if args.quick else smollm(space, args.model)
    dtype = "float64" if args.quick else "float32"
    loaded = load_model(model, dtype=dtype, device=args.device)
    curve = space.work / f"curve-{loaded.name}-{args.device}-{args.threads}.json"
    if not curve.exists():
        progress("cost curve")
        size: dict[str, Any] = {"context": 16, "repeats": 1} if args.quick else {}
        measure(loaded.model, name=loaded.name, **size).save(curve)
    planner: Planner = Fixed(QUICK_NODES) if args.quick else CostPlanner(CostCurve.load(curve), BUDGET)
    figures, wrong = dict[str, Any](), 0
    for part in parts:
        text = make_text(space, loaded, model, args, part)
        if part == SERVING:
            rows = measure_serving(model, dtype, text, curve, space.work / "decoding-worker.log", args)
            wrong += sum(row["differ"] for row in rows) if args.quick else 0
        else:
            ways = ways_of(loaded.vocab_size, text, planner)
            rows = measure_text(loaded, text, ways, args.tokens, args.rounds)
            wrong += sum(not each["excused"] for row in rows for each in row["differences"])
        tokens = text.rest.manifest.counts["tokens"]
        show_rows(f"{part}: a store of {tokens:,} tokens, at most {args.tokens} an answer", rows)
        figures[part] = {"store_tokens": tokens, "ways": rows}
    return figures, wrong


def main() -> None:
    """Run the parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    add_arguments(parser)
    add_model_argument(parser)
    known = (OWN, APART, SERVING)
    parser.add_argument("--parts", help=f"any of {','.join(known)} (default: all)")
    parser.add_argument(
        "--prompts", type=int, help=f"of each text (default: {PROMPTS}); clients of the worker"
    )
    parser.add_argument("--tokens", type=int, help=f"of an answer at most (default: {TOKENS})")
    parser.add_argument("--rounds", type=int, help=f"(default: {ROUNDS})")
    parser.add_argument("--device", default="cpu", help="of the model (default: %(default)s)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of the model (default: one a core)")
    args = parser.parse_args()
    parts = chosen(parser, args.parts, known)
    args.prompts = args.prompts or (QUICK_PROMPTS if args.quick else PROMPTS)
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    about = describe_machine(["torch", "transformers"]) | {"quick": args.quick, "device": args.device}
    about |= {"tokens": args.tokens, "rounds": args.rounds}
    with open_workspace(args) as space:
        figures, wrong = run(args, space, parts)
    finish(args.out, "decoding", about | figures | {"load_average": os.getloadavg()[0], "wrong": wrong})
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Token Recycling by what it is told: `python -m benchmarks.recycling`.

SmolLM2-135M-Instruct answers prompts of AlpacaEval, Spec-Bench and HumanEval greedily, and its top 8 at all positions
of prompts and answers are recorded in one pass each. Drafts are then replayed over that record, at several numbers of
nodes:

    last row       told of the prompt's last position, no guesses
    prompt         told of the whole prompt
    guesses        told of the last position, with guesses (`draftstore.drafting.rank_tree`)
    both           as `RecyclingDrafter` is
    request        the request alone; with `last row` and with `both` in a mixture

`cold` begins every text with an empty matrix, `hot` with that of the texts before. What the model says after rejected
nodes is not in the record, so their rows stay as they were; `--live NODES` decodes some of the prompts instead. The
part `prefill` takes the processor's time for prompts read with and without their candidates, in turns.

Tables first; the last line of stdout is one JSON document, also written to OUT/recycling.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.recycling --work ~/bench
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.common import Workspace, add_arguments, evenly, open_workspace
from benchmarks.decode_runs import PLAIN, Way, figures_of, run_ways
from benchmarks.decode_texts import ALPACA, SPEC_BENCH, chat_prompt
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.smollm import add_model_argument, smollm
from draftstore.decoding.loop import Fixed, Tally, decode
from draftstore.decoding.replay import RecordedTarget
from draftstore.drafting.drafter import Drafter, Session
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.recycling import UNKNOWN, RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.loading import LoadedModel, load_model
from draftstore.text.records import read_json_records

NODES = (8, 16, 32, 64)
TOGETHER = 10
"""Prompts that are answered together."""
LONGEST = 600
"""Most tokens of a prompt."""
PREFILLS, REPEATS = (128, 512), 5


class Told(NamedTuple):
    """An answer, and what the model says at all positions.

    Attributes:
        text: kind of text.
        prompt: int32 [m].
        output: int32 [n].
        top: int32 [m + n, 8], the most likely tokens at each of them.
    """

    text: str
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    top: NDArray[np.int32]


class Guessless(RecyclingDrafter):
    """Token Recycling that knows nothing of the pass before."""

    def _row(self, token: int) -> NDArray[np.int32]:  # noqa: ARG002
        return UNKNOWN


class LastRow:
    """A drafter that is told of the last position of a prompt alone."""

    def __init__(self, drafter: RecyclingDrafter) -> None:
        """Tell `drafter` less."""
        self._drafter = drafter

    def session(
        self, prompt_ids: ArrayLike, *, candidates: NDArray[np.int32] | None = None, **prefill: Any
    ) -> Session:
        """Start the drafts of one text; see `Drafter.session`."""
        last = None if candidates is None else candidates[-1:]
        return self._drafter.session(prompt_ids, candidates=last, **prefill)


def drafters_of(size: int) -> dict[str, Callable[[], Drafter]]:
    """Return the ways of drafting for a vocabulary."""
    return {
        "last row": lambda: LastRow(Guessless(size)),
        "prompt": lambda: Guessless(size),
        "guesses": lambda: LastRow(RecyclingDrafter(size)),
        "both": lambda: RecyclingDrafter(size),
        "request": lambda: RequestDrafter(size),
        "request, last row": lambda: Mixture([RequestDrafter(size), LastRow(Guessless(size))]),
        "request, both": lambda: Mixture([RequestDrafter(size), RecyclingDrafter(size)]),
    }


class ToldTarget(RecordedTarget):
    """A recorded output with the candidates along it."""

    def __init__(self, told: Told) -> None:
        """Replay an answer."""
        super().__init__(told.output)
        self._told = told

    def candidates(self) -> NDArray[np.int32]:  # type: ignore[override]
        """Return int32 [n + 1, 8], -1 at nodes off the answer."""
        first = len(self._told.prompt) + self._begin - 1
        path = self._tree.accepted(self._told.output[self._begin :])
        rows = np.full((len(self._tree) + 1, 8), -1, np.int32)
        rows[[0, *(node + 1 for node in path)]] = self._told.top[first : first + len(path) + 1]
        return rows


def replay_told(make: Callable[[], Drafter], texts: Sequence[Told], nodes: int, *, hot: bool) -> Tally:
    """Return the totals of replayed texts; hot, one drafter drafts them all."""
    total, drafter = Tally(), make()
    for told in texts:
        drafter = drafter if hot else make()
        begun, size = np.append(told.prompt, told.output[:1]), len(told.prompt)
        session = drafter.session(begun, candidates=told.top[:size])
        target = ToldTarget(told)
        for step in (
            decode(target, session, planner=Fixed(nodes), ends=target.ends) if len(told.output) > 1 else ()
        ):
            total.add(step)
    return total


def questions(space: Workspace, count: int) -> Iterator[tuple[str, str]]:
    """Yield kinds of text and prompts: of Spec-Bench as many of each task, of the others `count` of each."""

    def records(name: str) -> list[dict[str, Any]]:
        return [record for _, record in read_json_records(space.data / "replays" / name)]

    alpaca = list(dict.fromkeys(record["prompt"][0]["content"] for record in records(ALPACA)))
    yield from (("chat", question) for question in evenly(alpaca[1:-1], count))
    spec = records(SPEC_BENCH)
    for task in sorted({record["category"] for record in spec}):
        own = [record["prompt"][0]["content"] for record in spec if record["category"] == task]
        yield from (("tasks", question) for question in evenly(own[1:-1], max(1, count // 4)))
    code = [record["prompt"] for record in records("humaneval_problems.jsonl.zst")]
    yield from (
        ("code", f"Complete this function:\n\n{each}") for each in evenly(code[1:-1], max(1, count // 2))
    )


def record_told(space: Workspace, loaded: LoadedModel, count: int, tokens: int) -> list[Told]:
    """Have the model answer, and say its top 8 everywhere."""
    import torch

    from draftstore.hf import generate
    from draftstore.hf.passes import choices
    from draftstore.hf.prompts import ONLY_CANDIDATES

    model: Any = loaded.model
    asked = [(text, chat_prompt(loaded, question)) for text, question in questions(space, count)]
    asked = sorted((each for each in asked if len(each[1]) <= LONGEST), key=lambda each: len(each[1]))
    found: list[Told] = []
    for begin in range(0, len(asked), TOGETHER):
        progress(f"answers to prompts from {begin} on of {len(asked)}")
        some = asked[begin : begin + TOGETHER]
        width = len(some[-1][1])
        ids = torch.zeros((len(some), width), dtype=torch.int64)
        for row, (_, prompt) in zip(ids, some, strict=True):
            row[width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        lengths = torch.tensor([len(prompt) for _, prompt in some])
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        output = generate(
            model, ids, attention_mask=mask, drafter=RequestDrafter(loaded.vocab_size), budget=2,
            max_new_tokens=tokens, do_sample=False, pad_token_id=-1,
        )  # fmt: skip
        for (text, prompt), row in zip(some, output[:, width:].numpy(), strict=True):
            answer = row[row >= 0].astype(np.int32)
            whole = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
            with torch.inference_mode():
                top = choices(model(whole[None], use_cache=False).logits[0], ONLY_CANDIDATES)
            assert top is not None
            found.append(Told(text, prompt.astype(np.int32), answer, top.numpy().astype(np.int32)))
    return found


def time_prefill(loaded: LoadedModel, texts: Sequence[Told], repeats: int) -> list[dict[str, Any]]:
    """Time the reading of prompts, with and without their candidates."""
    import torch

    from draftstore.hf import generate

    ids, rows = np.concatenate([told.prompt for told in texts]).astype(np.int64), []
    size = loaded.vocab_size
    ways: dict[str, Drafter] = {"last row": LastRow(RecyclingDrafter(size)), "prompt": RecyclingDrafter(size)}
    for length in PREFILLS:
        prompt = torch.from_numpy(ids[:length])[None]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats + 1):
            for name, drafter in ways.items():
                begin = process_time()
                generate(
                    loaded.model, prompt, drafter=drafter, max_new_tokens=1, do_sample=False, pad_token_id=0
                )
                if turn:
                    seconds[name].append(process_time() - begin)
        asked = len(np.unique(ids[:length]))
        times = {name: round(median(each), 4) for name, each in seconds.items()}
        rows.append({"tokens": prompt.shape[1], "distinct": asked} | times)
    return rows


def decode_live(loaded: LoadedModel, texts: Sequence[Told], nodes: int, tokens: int) -> list[dict[str, Any]]:
    """Decode some prompts: rows of rejected nodes count, too."""
    drafters = drafters_of(loaded.vocab_size)
    ways = [Way(PLAIN, plain=True)]
    ways += [Way(name, drafters[name], Fixed(nodes)) for name in ("last row", "prompt", "both")]
    prompts = [told.prompt for told in evenly(texts, 6)]
    return figures_of(run_ways(loaded.model, ways, prompts, tokens=tokens, rounds=1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recycling", description=__doc__)
    add_arguments(parser)
    add_model_argument(parser)
    parser.add_argument(
        "--live", type=int, metavar="NODES", help="decode some prompts, too, with drafts of NODES"
    )
    parser.set_defaults(wheels=None)
    args = parser.parse_args(arguments)
    count, tokens = (2, 12) if args.quick else (16, 64)
    document: dict[str, Any] = describe_machine(["torch", "transformers"]) | {
        "quick": args.quick,
        "tokens": tokens,
    }
    with open_workspace(args) as space:
        loaded = load_model(smollm(space, args.model), dtype="float32", device="cpu")
        texts = record_told(space, loaded, count, tokens)
        kinds = ["chat", "tasks", "code"]
        document["texts"] = {kind: sum(told.text == kind for told in texts) for kind in kinds}
        document["accepted_length"] = rows = replay_all(loaded.vocab_size, texts, kinds)
        columns = ["nodes", "start", "way", "all", *kinds]
        show_table("M", columns, ([row[column] for column in columns] for row in rows))
        document["prefill"] = time_prefill(loaded, texts, 1 if args.quick else REPEATS)
        show_table(
            "prefill, seconds of the processor",
            list(document["prefill"][0]),
            (row.values() for row in document["prefill"]),
        )
        if args.live:
            document["live"] = live = decode_live(loaded, texts, args.live, tokens)
            shown = ("way", "accepted_length", "nodes", "prefill_seconds", "differences")
            show_table(
                f"live, {args.live} nodes", shown, ([row.get(key, "") for key in shown] for row in live)
            )
        finish(args.out, "recycling", document)


def replay_all(vocab_size: int, texts: Sequence[Told], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return M of every way, at every number of nodes, cold and hot, over all texts and by kind."""
    rows = []
    for hot in (False, True):
        for nodes in NODES:
            for name, make in drafters_of(vocab_size).items():
                row: dict[str, Any] = {"nodes": nodes, "start": "hot" if hot else "cold", "way": name}
                for kind in ("all", *kinds):
                    own = [told for told in texts if kind in ("all", told.text)]
                    row[kind] = round(replay_told(make, own, nodes, hot=hot).accepted_length, 3)
                rows.append(row)
    return rows


if __name__ == "__main__":
    main()

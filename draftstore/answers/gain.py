"""The gain to expect from drafts on a log of conversations: accepted length by source of drafts, and what that yields.

The log is split by a digest of each conversation. Each half is built into a store, from which the other half is
replayed (`draftstore.decoding.replay`), also with the request and with live memory of the outputs before. So no text
counts twice: records that a later one repeats, as in logs of every request, are read once, and all records that share
their beginning up to the first answer are one conversation, which lies in one half.

    half-1.jsonl, half-2.jsonl           the conversations of the halves, in order of traffic
    replayed-1.jsonl, replayed-2.jsonl   those drawn for the replay
    store-1, store-2                     REST stores of the halves

`draftstore replay store-2 --request --chain 8 --replays replayed-1.jsonl` gives the same figures for a half.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.curve import CostCurve
from draftstore.decoding.replay import MAX_OUTPUT_TOKENS, Recording, Turn, record_turn, replay, turns_of
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import CorpusError, ReplayError, TokenizerError, counted
from draftstore.live.log import LiveDocument
from draftstore.live.memory import Memory, MemoryDrafter
from draftstore.processes import map_apart
from draftstore.storage.report import Progress, ReadReport, RecordProblem, silent
from draftstore.storage.streams import write_lines
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.corpus import DATA_PATTERNS, find_files
from draftstore.text.digests import identify
from draftstore.text.records import CONVERSATIONS, TURNS, joined, read_objects, record_id
from draftstore.text.selecting import RecordOptions
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.frontier import BUDGET

TOKENS = 100_000
"""Default maximum of replayed tokens."""
SOURCES = {
    "request": (False, False),
    "request + live": (True, False),
    "request + store": (False, True),
    "request + live + store": (True, True),
}
"""Whether drafts also come from live memory, and from the store of the other half."""
SHAPES: dict[str, tuple[int, int | None]] = {
    "chain of 8": (BUDGET, 8),
    "tree of 16": (16, None),
    "tree of 64": (64, None),
}
"""Budget of a draft and, for engines without tree verification, the length of its best path."""
NODES = {shape: chain or budget for shape, (budget, chain) in SHAPES.items()}
RESAMPLES, INTERVAL = 1000, (2.5, 97.5)
"""Bootstrap samples of conversations, and the percentiles of the interval."""


class Conversation(NamedTuple):
    """A record of a log: the digest of its beginning up to the first answer, its JSON and its outputs."""

    key: bytes
    record: dict[str, Any]
    turns: list[Turn]


class Drawn(NamedTuple):
    """Outputs of a half in order of traffic, each with the number of its drawn conversation; -1: only learned."""

    outputs: list[tuple[int, Recording]]
    size: int


class Place(NamedTuple):
    """A replay: that of a half, with a combination of sources and a shape of drafts."""

    half: int
    source: str
    shape: str


class Part(NamedTuple):
    """A replay, the outputs of its half, and the store of the other."""

    place: Place
    drawn: Drawn
    store: Path


class Played(NamedTuple):
    """Tokens and passes of each conversation, float64 [conversations, 2], and the median seconds of a draft."""

    counts: NDArray[np.float64]
    draft_seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures of a combination of sources and a shape of drafts.

    Attributes:
        length: accepted length of both halves, `halves` those of each.
        interval: 95 % interval of `length`, by a bootstrap over conversations.
        draft_us: median microseconds to draft for one text, of one core.
        speeds: tokens per second by number of texts, if passes were measured; all texts verify all nodes.
    """

    sources: str
    drafts: str
    length: float
    interval: tuple[float, float]
    halves: tuple[float, ...]
    draft_us: float
    speeds: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Gain:
    """The figures of a log: conversations and outputs in it, those replayed, and what was skipped."""

    conversations: int
    outputs: int
    replayed: int
    tokens: int
    rows: tuple[Row, ...]
    plain: dict[int, float]
    report: ReadReport


def measure_gain(
    paths: Sequence[Path],
    tokenizer: TextTokenizer,
    work: Path,
    *,
    records: RecordOptions = TURNS,
    tokens: int = TOKENS,
    seed: int = 0,
    curve: CostCurve | None = None,
    progress: Progress = silent,
) -> Gain:
    """Split a log in halves, build each, and replay the other with every source and shape of drafts.

    Args:
        paths: files of conversations, as `build_rest` reads, older ones first.
        records: names the keys of prompts and outputs, if the records have these instead.
        tokenizer: that of the model that will decode.
        work: folder of the halves and their stores, which are replaced.
        tokens: maximum of replayed tokens, drawn by conversation; the first of a half is drawn in any case.
        seed: chooses another split.
        curve: measured costs of passes, for tokens per second.
        progress: reports the steps.

    Raises:
        ReplayError: there are fewer than two conversations with an answer.
        CorpusError: a file cannot be read.
    """
    report = ReadReport()
    conversations = read_log(paths, report, records)
    halves = split(conversations, seed)
    stores, drawn = [], []
    for number, half in enumerate(halves, 1):
        name = f"store-{number}"
        _write(file := work / f"half-{number}.jsonl", half)
        options = RestOptions(corpus=(file,), name=name)
        stores.append(build_rest(options, tokenizer, work / name, overwrite=True, progress=progress).path)
        replayed = work / f"replayed-{number}.jsonl"
        drawn.append(_draw(half, tokenizer, tokens // 2, seed, replayed, report))
    played = _replay(drawn, stores, progress)
    one = [figures.counts for place, figures in played.items() if place[1:] == ("request", "chain of 8")]
    return Gain(
        len({each.key for each in conversations}),
        sum(len(each.turns) for each in conversations),
        sum(half.size for half in drawn),
        int(sum(counts[:, 0].sum() for counts in one)),
        tuple(_row(source, shape, played, curve) for shape, source in product(SHAPES, SOURCES)),
        {texts: texts / curve.cost(1, texts) for texts in _measured(curve)} if curve else {},
        report,
    )


def read_log(paths: Sequence[Path], report: ReadReport, records: RecordOptions = TURNS) -> list[Conversation]:
    """Read the records with an answer, each conversation once: without copies and beginnings of others."""
    found, begun = dict[bytes, Conversation](), set[bytes]()
    for file in find_files(paths, DATA_PATTERNS, report):
        for place, record in read_objects(file.path, records):
            if isinstance(record, RecordProblem):
                report.add_problem(record)
                continue
            try:
                made = _conversation(_named(record, records.pair), place)
            except (CorpusError, ReplayError, TokenizerError) as error:
                report.add_problem(RecordProblem(place, str(error).removeprefix(f"{place}: ")))
                continue
            report.documents += 1
            if made is not None:
                text, beginnings, conversation = made
                found.setdefault(text, conversation)
                begun.update(beginnings)
    conversations = [each for text, each in found.items() if text not in begun]
    number = len({each.key for each in conversations})
    if number < 2:
        reasons = report.absence()
        raise ReplayError(
            f"{', '.join(map(str, paths))}: a gain needs two conversations with an answer that follows a question, "
            f"found {number} in {counted(report.documents, 'record')}" + f" ({reasons})" * bool(reasons)
        )
    return conversations


def _named(record: dict[str, Any], pair: tuple[str, str] | None) -> dict[str, Any]:
    """Return a record with the names of a recording for its prompt and output, or as a conversation."""
    if pair is None:
        return record
    content, (prompt, output) = joined(record, pair), (record[key] for key in pair)
    made = {"prompt": prompt, "output": output} if isinstance(output, str) else {CONVERSATIONS[0]: content}
    return {"id": record_id(record)} | made if record_id(record) else made


def _conversation(
    record: Mapping[str, Any], place: str
) -> tuple[bytes, tuple[bytes, ...], Conversation] | None:
    """Return the digests of a record's text and of its beginnings, and its conversation; None without an answer."""
    turns, name = turns_of(record, place), record_id(record) or place
    if not turns:
        return None
    last = turns[-1]
    if isinstance(last.whole, str):
        made = {"id": name, "prompt": last.prompt, "output": last.output, "text": last.whole}
    else:
        made = {"id": name, "messages": last.whole}
    digests = identify(last.whole)
    text, beginnings = digests.text, digests.beginnings
    if text is None:
        return None
    key = beginnings[1] if beginnings else text
    return text, beginnings, Conversation(key, made, turns_of(made, place))


def split(conversations: Sequence[Conversation], seed: int = 0) -> tuple[list[Conversation], ...]:
    """Return two halves with equal numbers of conversations, each in the order of the log."""
    second = set(_in_order(conversations, seed)[1::2])
    return tuple([each for each in conversations if (each.key in second) == half] for half in (False, True))


def _in_order(conversations: Sequence[Conversation], seed: int) -> list[bytes]:
    """Return the keys of conversations, in an order that depends on each key and the seed."""
    salt = seed.to_bytes(8, "little")
    keys = {each.key for each in conversations}
    return sorted(keys, key=lambda key: hashlib.blake2b(key, salt=salt).digest())


def _write(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations as JSON Lines, readable by their owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    write_lines(path, (json.dumps(each.record).encode() for each in conversations), path.suffix)


def _draw(
    half: Sequence[Conversation],
    tokenizer: TextTokenizer,
    tokens: int,
    seed: int,
    out: Path,
    report: ReadReport,
) -> Drawn:
    """Draw conversations of a half up to a number of tokens and write them; encode the other outputs to learn."""
    records, encoded = dict[bytes, list[Conversation]](), dict[bytes, list[list[Recording]]]()
    for each in half:
        records.setdefault(each.key, []).append(each)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        encode = partial(record_turn, tokenizer=tokenizer)
        for key in _in_order(half, seed):
            try:
                made = [list(threads.map(encode, each.turns)) for each in records[key]]
            except TokenizerError as error:
                report.add_problem(RecordProblem(records[key][0].record["id"], str(error)))
                continue
            tokens -= sum(len(output.output) for outputs in made for output in outputs)
            if encoded and tokens < 0:
                break
            encoded[key] = made
    _write(out, [each for each in half if each.key in encoded])
    places = {key: place for place, key in enumerate(encoded)}
    outputs = list[tuple[int, Recording]]()
    for each in half:
        drawn = each.key in encoded
        recordings = encoded[each.key].pop(0) if drawn else _alone(each.turns, tokenizer)
        outputs += [(places.get(each.key, -1), recording) for recording in recordings]
    return Drawn(outputs, len(places))


def _alone(turns: Sequence[Turn], tokenizer: TextTokenizer) -> list[Recording]:
    """Return outputs without their prompts, which take most of the time; those of invalid Unicode are left out."""
    none = np.empty(0, np.int32)
    try:
        encoded = tokenizer.encode_documents([turn.output for turn in turns])
    except TokenizerError:
        return []
    return [
        Recording(turn.id, none, ids[:MAX_OUTPUT_TOKENS]) for turn, ids in zip(turns, encoded, strict=True)
    ]


def _replay(drawn: Sequence[Drawn], stores: Sequence[Path], progress: Progress) -> dict[Place, Played]:
    """Replay both halves in every way, in a process for each core."""
    parts = [
        Part(Place(half, source, shape), drawn[half], stores[1 - half])
        for source, shape, half in product(reversed(SOURCES), SHAPES, range(len(drawn)))
    ]
    played, step = dict[Place, Played](), progress("replaying", "parts")
    step(0, len(parts))
    for place, figures in map_apart(_play, parts, min(os.cpu_count() or 1, len(parts))):
        played[place] = figures
        step(len(played), len(parts))
    return played


def _play(part: Part) -> tuple[Place, Played]:
    live, stored = SOURCES[part.place.source]
    budget, chain = SHAPES[part.place.shape]
    store = RestStore.open(part.store)
    memory = Memory(store.manifest.vocab_size) if live else None
    drafters: list[Drafter] = [RequestDrafter(store.manifest.vocab_size)]
    if memory is not None:
        drafters.append(MemoryDrafter(memory, "supplement" if stored else "sole"))
    drafter = Mixture([*drafters, store.drafter()] if stored else drafters)
    drafter.warm_up()
    counts, nanoseconds = np.zeros((part.drawn.size, 2)), [0]
    for number, recording in part.drawn.outputs:
        if number >= 0:
            result = replay(drafter, [recording], budget=budget, chain=chain)
            counts[number] += result.tokens, result.passes
            nanoseconds += result.lookup_ns
        if memory is not None:
            memory.append(LiveDocument.of(recording.prompt, recording.output).ids)
    store.close()
    return part.place, Played(counts, float(np.median(nanoseconds)) / 1e9)


def _row(source: str, shape: str, played: Mapping[Place, Played], curve: CostCurve | None) -> Row:
    halves = [played[Place(half, source, shape)] for half in (0, 1)]
    counts = np.concatenate([half.counts for half in halves])
    length, nodes = _length(counts), NODES[shape]
    seconds = sum(half.draft_seconds for half in halves) / len(halves)
    speeds = (
        {
            texts: texts * length / (curve.cost(nodes + 1, texts) + texts * seconds)
            for texts in _measured(curve)
        }
        if curve
        else {}
    )
    each = tuple(_length(half.counts) for half in halves)
    return Row(source, shape, length, _interval(counts), each, seconds * 1e6, speeds)


def _measured(curve: CostCurve) -> list[int]:
    """Return the numbers of texts of which passes were measured: others would be a guess."""
    return [each.texts for each in curve.every()]


def _length(counts: NDArray[np.float64]) -> float:
    tokens, passes = counts.sum(axis=0)
    return float(tokens / max(passes, 1))


def _interval(counts: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of the accepted length, by a bootstrap over conversations."""
    rng, size = np.random.default_rng(0), len(counts)
    lengths = [_length(counts[rng.integers(size, size=size)]) for _ in range(RESAMPLES)]
    low, high = np.percentile(lengths, INTERVAL)
    return float(low), float(high)

"""What a store of so many tokens costs: hours, bytes, memory and lookups, from measured rates. Arithmetic alone.

Every constant is in `RATES`, with where it was measured: on two cores of a shared machine, with stores of 1 to 300
million tokens. What lies beyond is the same arithmetic, not a measurement.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from draftstore.errors import DraftstoreError, require_limits

SEGMENT_TOKENS = 1 << 28
"""Default tokens of a segment, as of a build."""
MAX_SEGMENT_TOKENS = 2**31 - 2
SUFFIX_BYTES, KEY_BYTES, DOCUMENT_BYTES = 4.0, 0.5, 16.0
"""Of a store, beside the tokens: a suffix and a sixteenth of a key for each token, a digest for each document."""
PART_ROWS = 1 << 22
"""Rows that are counted at a time, unless one first token has more."""
MANY_SEGMENTS = 4
"""Segments that take as long to search as everything else in a lookup."""
READ = 128 * 1024
"""Bytes that the system reads around a page that is missing."""
USED_MEMORY = 0.8
"""Share of a machine's memory that sorting may take."""


class Rate(NamedTuple):
    """A measured figure.

    Attributes:
        value: the figure.
        unit: its unit.
        source: where it was measured: a file under benchmarks/results, and what of it.
    """

    value: float
    unit: str
    source: str


RATES: Mapping[str, Rate] = {
    "tokenize": Rate(
        1.17e6, "tokens/s of a core", "rest_scale.json: all_corpora, one core; Llama-2's tokenizer"
    ),
    "sort": Rate(4.5e6, "tokens/s of a core", "rest_scale.json: chat_sharegpt_5M, the slowest"),
    "sort_memory": Rate(5.62, "bytes a token beside the text", "rest_scale.json: chat_sharegpt_5M, the most"),
    "finish": Rate(
        0.47e9, "bytes/s", "rest_scale.json: all_corpora, other_seconds: copied, hashed, published"
    ),
    "text": Rate(4.0, "bytes a token", "96.0 M tokens in 387.4 MB of chat; code has 3.3"),
    "documents": Rate(530.0, "tokens a document", "rest_scale.json: all_corpora"),
    "count": Rate(1.2e7, "tokens/s of a core", "crest_build.json: counting, n-grams of 1 to 5 tokens"),
    "distil": Rate(0.986e6, "tokens/s of a core", "growth.json: all, 316 M tokens, CREST of 50 MB"),
    "commonest": Rate(
        0.09, "share of the most common token", "first_rows.bin of 40 packages; ShareGPT: 0.05"
    ),
    "lookup": Rate(
        94e-6, "s", "growth.json: chat_0.3, 29 M tokens in one segment, backoff, 64 nodes, one core"
    ),
    "lookup_doubling": Rate(
        11e-6,
        "s for twice the tokens of a segment",
        "billion.json: a segment of 268 M tokens, beside that of 29 M",
    ),
    "lookup_segment": Rate(35e-6, "s for each further segment", "billion.json: four of 268 M tokens"),
    "lookup_reads": Rate(
        2200.0,
        "reads of 128 KiB, if nothing is in memory",
        "growth.json: cold, 98 M tokens; fewer in small stores",
    ),
}
LOOKUP_TOKENS, READ_TOKENS = 29.5e6, 97.9e6
"""Tokens of the segments that `lookup` and `lookup_reads` were measured in."""


class Law(NamedTuple):
    """Accepted length by tokens of text: M = offset + slope log10(tokens), beside M = 1 + factor tokens^exponent.

    Attributes:
        offset: of the logarithm.
        slope: what ten times the text adds.
        factor: of the power law.
        exponent: of the power law.
        error: what a further observation may differ from the first law by, with 95 % probability, in the middle.
        mean: middle of the samples, log10(tokens).
        weight: sum of the samples' squared distances from it.
        points: number of samples.
        most: tokens of the largest.
    """

    offset: float
    slope: float
    factor: float
    exponent: float
    error: float
    mean: float
    weight: float
    points: int
    most: float

    def at(self, tokens: float) -> tuple[float, float, float]:
        """Return the least, the likely and the most accepted length: both laws, with the error of a line."""
        place = math.log10(tokens)
        likely, power = self.offset + self.slope * place, 1 + self.factor * tokens**self.exponent
        spread = self.error * (1 + 1 / self.points + (place - self.mean) ** 2 / self.weight) ** 0.5
        return max(1.0, min(likely, power) - spread), max(1.0, likely), max(likely, power) + spread


LAWS: Mapping[str, Law] = {
    "chat: AlpacaEval, Vicuna-7B": Law(
        0.3436, 0.24426, 0.19567, 0.10357, 0.052698, 6.9863, 2.4839, 5, 97911515.0
    ),
    "chat: Spec-Bench, Vicuna-7B": Law(
        0.4985, 0.18766, 0.15076, 0.1036, 0.060299, 6.9863, 2.4839, 5, 97911515.0
    ),
    "chat: HumanEval, CodeLlama-7b": Law(
        0.14652, 0.29828, 0.21039, 0.10882, 0.09311, 6.9863, 2.4839, 5, 97911515.0
    ),
    "code: HumanEval, CodeLlama-7b": Law(
        0.36478, 0.23346, 0.19208, 0.10136, 0.089645, 7.1697, 2.6379, 5, 156154749.0
    ),
}
"""Of REST stores, drafts of 64 nodes: benchmarks/results/growth.json. Points are samples of one set of texts."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Texts, and the machines that build and serve their store.

    Attributes:
        tokens: of the texts.
        machines: that tokenize and sort.
        cores: of each.
        memory: bytes of each.
        vocabulary: token ids of the model.
        disk_bandwidth: bytes/s of each machine's disk, reading or writing.
        disk_latency: seconds of a random read.
        segment_tokens: most tokens of a segment.
        added: tokens of new text a day; None: a hundredth.
    """

    tokens: float
    machines: int = 1
    cores: int = 16
    memory: float = 64e9
    vocabulary: int = 32_000
    disk_bandwidth: float = 1e9
    disk_latency: float = 100e-6
    segment_tokens: int = SEGMENT_TOKENS
    added: float | None = None

    def check(self) -> None:
        """Refuse what no site has.

        Raises:
            DraftstoreError: the first problem, with what is expected.
        """
        limits: dict[str, tuple[float, float, float | None]] = {
            "tokens": (self.tokens, 1e3, 1e15),
            "machines": (self.machines, 1, 1e5),
            "cores": (self.cores, 1, 4096),
            "memory": (self.memory, 1e9, 1e14),
            "vocabulary": (self.vocabulary, 2, 2**31 - 1),
            "disk_bandwidth": (self.disk_bandwidth, 1e6, 1e12),
            "disk_latency": (self.disk_latency, 0, 1),
            "segment_tokens": (self.segment_tokens, 2, MAX_SEGMENT_TOKENS),
            "added": (self.new_tokens, 0, self.tokens),
        }
        require_limits("a plan", limits, digits=",.6g")
        needed = self.sort_memory
        if needed > self.memory * USED_MEMORY:
            fitting = int(self.memory * USED_MEMORY / (needed / self.largest_segment))
            raise DraftstoreError(
                f"sorting a segment of {self.largest_segment:,.0f} tokens takes {needed / 1e9:.1f} GB, a machine has "
                f"{self.memory / 1e9:.1f} GB: take --segment-tokens {fitting} or less"
            )

    @property
    def new_tokens(self) -> float:
        """Tokens of new text a day."""
        return self.tokens / 100 if self.added is None else self.added

    @property
    def token_bytes(self) -> int:
        """Bytes of a token id."""
        return 2 if self.vocabulary <= 65_535 else 4

    @property
    def entries(self) -> float:
        """Tokens with the ends of documents."""
        return self.tokens + self.documents

    @property
    def documents(self) -> float:
        """Documents, if they are as long as those that were measured."""
        return math.ceil(self.tokens / RATES["documents"].value)

    @property
    def segments(self) -> int:
        """Segments of the store."""
        return math.ceil(self.entries / self.segment_tokens)

    @property
    def largest_segment(self) -> float:
        """Tokens of the largest segment."""
        return min(self.entries, self.segment_tokens)

    @property
    def sort_memory(self) -> float:
        """Bytes that sorting one segment takes, its text included."""
        return self.largest_segment * (self.token_bytes + RATES["sort_memory"].value)

    @property
    def sorters(self) -> int:
        """Segments that a machine sorts at once."""
        fitting = int(self.memory * USED_MEMORY / self.sort_memory)
        return max(1, min(self.cores, fitting, math.ceil(self.segments / self.machines)))


def plan(site: Site, rates: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return what a store takes.

    Args:
        site: texts and machines.
        rates: figures in place of those of `RATES`, by name.

    Returns:
        `segments`, and by name `bytes`, `hours` (of the whole build), `memory` (bytes), `lookup` (seconds, bytes,
        reads), and `night` (a nightly merge of the new text: bytes and hours); and `limits`, sentences about what will
        not go well.

    Raises:
        DraftstoreError: numbers that no site has.
    """
    site.check()
    known = {name: rate.value for name, rate in RATES.items()} | dict(rates or {})
    size = _bytes(site, known)
    hours = _hours(site, size, known)
    lookup = _lookup(site, size["rest"], known)
    planned = {
        "segments": site.segments,
        "bytes": size,
        "hours": hours | {"all": sum(hours.values())},
        "memory": {
            "sort_a_segment": site.sort_memory,
            "sorters": site.sorters,
            "sort": site.sort_memory * site.sorters,
            "count": _count_memory(site, known),
        },
        "lookup": lookup,
        "night": _night(site, size, known),
    }
    return planned | {"limits": _limits(site, planned)}


def _bytes(site: Site, known: Mapping[str, float]) -> dict[str, float]:
    rest = site.entries * (site.token_bytes + SUFFIX_BYTES + KEY_BYTES)
    rest += site.segments * (site.vocabulary + 1) * 4 + site.documents * DOCUMENT_BYTES
    shards = site.tokens * site.token_bytes + site.documents * 8
    return {"text": site.tokens * known["text"], "shards": shards, "rest": rest}


def _count_memory(site: Site, known: Mapping[str, float]) -> float:
    """Return what counting holds of one range of first tokens: five n-grams and their counts for each row."""
    rows = max(PART_ROWS, known["commonest"] * site.tokens)
    return rows * (15 * site.token_bytes + 5 * 8)


def _hours(site: Site, size: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """Return the hours of each step: of the processors, or of the disks where these take longer."""
    disks = site.disk_bandwidth * site.machines
    at_once = max(site.largest_segment, site.entries / (site.sorters * site.machines))
    seconds = {
        "tokenize": max(
            site.tokens / (known["tokenize"] * site.cores * site.machines),
            (size["text"] + size["shards"]) / disks,
        ),
        "sort": max(at_once / known["sort"], (size["shards"] + size["rest"]) / disks),
        "finish": size["rest"] / min(known["finish"], site.disk_bandwidth),
        "count": max(site.tokens / (known["count"] * site.cores), size["rest"] / site.disk_bandwidth),
        "distil": max(site.tokens / (known["distil"] * site.cores), size["rest"] / site.disk_bandwidth),
    }
    return {step: each / 3600 for step, each in seconds.items()}


def _lookup(site: Site, rest: float, known: Mapping[str, float]) -> dict[str, float]:
    """Return what a lookup takes on one machine that serves the whole store."""
    warm = _one_segment(site.largest_segment, known) + known["lookup_segment"] * (site.segments - 1)
    reads = known["lookup_reads"] * warm / _one_segment(READ_TOKENS, known)
    missing = max(0.0, 1 - site.memory * USED_MEMORY / rest)
    return {
        "in_memory": warm,
        "reads": reads,
        "page_cache": rest,
        "share_on_disk": missing,
        "with_disk": warm + missing * reads * (site.disk_latency + READ / site.disk_bandwidth),
    }


def _one_segment(tokens: float, known: Mapping[str, float]) -> float:
    """Return the seconds of a lookup in one segment that lies in memory."""
    return known["lookup"] + known["lookup_doubling"] * max(0.0, math.log2(tokens / LOOKUP_TOKENS))


def _limits(site: Site, planned: Mapping[str, Any]) -> list[str]:
    """Return what will not go well, and what to do about it."""
    memory, counting, rest = site.memory, planned["memory"]["count"], planned["bytes"]["rest"]
    found = []
    if counting > memory:
        found.append(
            f"counting and CREST take {counting / 1e9:,.0f} GB at the most common token, a machine has "
            f"{memory / 1e9:,.0f} GB: distil from a sample of the text"
        )
    if rest > memory:
        found.append(
            f"the store is larger than the memory ({memory / 1e9:,.0f} GB), lookups wait for the disk: serve it in "
            f"{math.ceil(rest / (memory * USED_MEMORY)):,} partitions (draftstore serve --partition), or CREST"
        )
    if site.segments > MANY_SEGMENTS and site.segment_tokens < MAX_SEGMENT_TOKENS:
        found.append(
            f"a lookup searches {site.segments:,} segments: give the build --segment-tokens {MAX_SEGMENT_TOKENS} if "
            "sorting them fits into the memory"
        )
    return found


def _night(site: Site, size: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """Return what a merge of the new text takes: that is tokenized and sorted, all else is copied, on one machine."""
    share = site.new_tokens / site.tokens
    written = size["rest"] * (1 + share)
    made = site.new_tokens * (1 / (known["tokenize"] * site.cores) + 1 / known["sort"])
    copied = (size["rest"] + written) / site.disk_bandwidth + written / min(
        known["finish"], site.disk_bandwidth
    )
    return {"tokens": site.new_tokens, "bytes_written": written, "hours": (made + copied) / 3600}

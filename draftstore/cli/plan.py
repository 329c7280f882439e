"""`draftstore plan`: what a store of so many tokens would take, before anything is built."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftstore.cli.common import STORE, json_option, print_json, status, stdout_console
from draftstore.cli.crest import ByteSize
from draftstore.sizing import LAWS, RATES, SEGMENT_TOKENS, Law, Site
from draftstore.sizing import plan as plan_site

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
STEPS = {
    "tokenize": "tokenize, on all machines",
    "sort": "sort, on all machines",
    "finish": "copy, hash and publish, on one",
    "count": "count n-grams, on one",
    "distil": "distil CREST in 50 MB, on one",
    "all": "all, one after the other",
}


class TokenCount(click.ParamType[float]):
    """A number of tokens, such as `1e11`, `300M` or `2.5B`."""

    name = "tokens"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the tokens."""
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\+?\d{1,2})?)\s*([kmgbt]?)\s*", value, re.IGNORECASE)
        if not found:
            self.fail(
                f"{value!r} is not a number of tokens: expected one such as 1e11, 300M or 2.5B", param, ctx
            )
        return float(found[1]) * UNITS[found[2].lower()]


@click.command()
@click.option("--tokens", type=TokenCount(), required=True, help="Tokens of the texts, such as 1e11 or 300M.")
@click.option("--machines", type=int, default=1, show_default=True, help="Machines that tokenize and sort.")
@click.option("--cores", type=int, default=16, show_default=True, help="Cores of each.")
@click.option("--memory", type=ByteSize(), default="64GB", show_default=True, help="Memory of each.")
@click.option(
    "--vocabulary", type=int, default=32_000, show_default=True, help="Number of token ids of the model."
)
@click.option(
    "--disk-bandwidth",
    type=ByteSize(),
    default="1GB",
    show_default=True,
    help="Bytes that a disk takes a second.",
)
@click.option(
    "--disk-latency", type=float, default=100.0, show_default=True, help="Microseconds of a random read."
)
@click.option(
    "--segment-tokens",
    type=int,
    default=SEGMENT_TOKENS,
    show_default=True,
    help="Maximum number of tokens in a suffix array.",
)
@click.option("--added", type=TokenCount(), help="Tokens of new text a day. [default: a hundredth]")
@click.option(
    "--measure", type=STORE, metavar="STORE",
    help="Take the rates of this machine, measured for some seconds with the tokens of a REST store.",
)  # fmt: skip
@json_option
def plan(
    tokens: float,
    machines: int,
    cores: int,
    memory: int,
    vocabulary: int,
    disk_bandwidth: int,
    disk_latency: float,
    segment_tokens: int,
    added: float | None,
    measure: Path | None,
    as_json: bool,
) -> None:
    """Say what a store of so many tokens would take: hours, bytes, memory, lookups, and the accepted length.

    Rates are those that the documentation quotes, or this machine's. Beyond what was measured, some hundred million
    tokens, sizes stay exact, times are arithmetic, and accepted lengths a guess with a wide range.

    \b
    Examples:
      draftstore plan --tokens 300M --cores 2 --memory 6GB
      draftstore plan --tokens 1e11 --machines 16 --cores 32 --memory 256GB --vocabulary 128000
      draftstore plan --tokens 1e9 --measure stores/chat --json
    """
    site = Site(
        tokens, machines, cores, memory, vocabulary, disk_bandwidth, disk_latency / 1e6, segment_tokens, added
    )
    site.check()
    rates: dict[str, float] = {}
    if measure:
        from draftstore.cli.rates import measure_rates

        with status("measuring this machine's rates"):
            rates = measure_rates(measure)
    planned = plan_site(site, rates)
    lengths = {
        name: dict(zip(("least", "likely", "most"), law.at(tokens), strict=True))
        for name, law in LAWS.items()
    }
    if as_json:
        known = {name: rate._asdict() for name, rate in RATES.items()}
        for name, value in rates.items():
            known[name] |= {"value": value, "source": f"measured here, {measure}"}
        print_json({"site": dataclasses.asdict(site), **planned, "accepted_length": lengths, "rates": known})
        return
    table = Table("what", "figure", title=f"{tokens:,.0f} tokens", title_justify="left")
    table.columns[1].justify = "right"
    for row in _rows(site, planned):
        table.add_row(*row)
    for name, law in LAWS.items():
        table.add_row(*_length_row(name, law, tokens))
    stdout_console().print(table)
    for sentence in planned["limits"]:
        stdout_console().print(f"- {sentence}")
    _show_rates(rates)


def _rows(site: Site, planned: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a plan says, in the order in which one asks."""
    size, memory, lookup, night = (planned[name] for name in ("bytes", "memory", "lookup", "night"))
    for step, hours in planned["hours"].items():
        yield f"time: {STEPS[step]}", _time(3600 * hours)
    yield "segments", f"{planned['segments']:,}"
    yield "bytes: text, about", in_bytes(size["text"])
    yield f"bytes: token shards, {site.token_bytes} a token", in_bytes(size["shards"])
    yield "bytes: REST store", in_bytes(size["rest"])
    yield "bytes: CREST store", "as you choose: --max-bytes"
    yield "memory: to sort a segment", in_bytes(memory["sort_a_segment"])
    yield f"memory: of {memory['sorters']} sorted at once on a machine", in_bytes(memory["sort"])
    yield "memory: to count the n-grams of the most common token", in_bytes(memory["count"])
    yield "lookup: page cache that holds the store", in_bytes(lookup["page_cache"])
    yield "lookup: all in memory", _time(lookup["in_memory"])
    yield (
        f"lookup: {lookup['share_on_disk']:.0%} on disk, of {lookup['reads']:,.0f} reads",
        _time(lookup["with_disk"]),
    )
    yield f"night: merge of {night['tokens']:,.0f} new tokens writes", in_bytes(night["bytes_written"])
    yield "night: time", _time(3600 * night["hours"])


def _length_row(name: str, law: Law, tokens: float) -> tuple[str, str]:
    """Return what a law says, and how far it goes beyond what was measured."""
    least, likely, most = law.at(tokens)
    beyond = tokens / law.most
    note = f", {beyond:,.0f} times beyond what was measured" if beyond > 2 else ""
    return f"accepted length: {name}{note}", f"{likely:.2f} ({least:.2f} to {most:.2f})"


def _show_rates(measured: Mapping[str, float]) -> None:
    """Print the rates that were used."""
    table = Table("rate", "figure", "unit", "measured in", title="rates", title_justify="left")
    table.columns[1].justify = "right"
    for name, rate in RATES.items():
        here = name in measured
        value = measured[name] if here else rate.value
        table.add_row(name, f"{value:,.3g}", rate.unit, "this machine, now" if here else rate.source)
    stdout_console().print(table)


def in_bytes(size: float) -> str:
    """Write bytes in the largest unit that leaves at least one of it."""
    divisor, unit = next((entry for entry in BYTES if size >= entry[0]), BYTES[-1])
    return f"{size / divisor:,.3g} {unit}" if size / divisor < 1000 else f"{size / divisor:,.0f} {unit}"


def _time(seconds: float) -> str:
    """Write a time in the largest unit that leaves at least one of it."""
    divisor, unit = next((entry for entry in TIMES if seconds >= entry[0]), TIMES[-1])
    return f"{seconds / divisor:,.3g} {unit}"

"""`draftstore build crest` and `draftstore count`: the n-grams of a REST store, as draft trees and as counts."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from draftstore.cli.build import (
    CORPUS_HELP,
    TOKENIZER_HELP,
    Bar,
    build,
    build_bars,
    cluster_option,
    name_option,
    out_option,
    overwrite_option,
    rehash_option,
    report_build,
    truncated_option,
)
from draftstore.cli.common import STORE, ManyValues, count_progress, json_option
from draftstore.cluster import open_pool
from draftstore.search.ngrams import MAX_N
from draftstore.stores.crest.build import DEFAULT_NGRAMS, RULES, CrestOptions, CrestProgress, build_crest
from draftstore.stores.crest.counts import DEFAULT_MAX_N, build_counts
from draftstore.stores.crest.entries import BACKENDS, LMDB
from draftstore.stores.crest.selection import GAIN, SELECTIONS
from draftstore.stores.crest.store import BACKOFF, BUDGET
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import load_tokenizer

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class ByteSize(click.ParamType[int]):
    """A number of bytes, such as `100MB`, `1.5GiB` or `65536`."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value, re.IGNORECASE)
        if not found:
            self.fail(
                f"{value!r} is not a size in bytes: expected one such as 100MB, 1.5GiB or 65536", param, ctx
            )
        return int(float(found[1]) * UNITS[(found[2] or "").lower()])


@build.command(cls=ManyValues)
@click.option("--rest", type=STORE, help="REST store that the trees are cut from.")
@click.option(
    "--corpus", multiple=True, metavar="PATH...", type=click.Path(path_type=Path),
    help="Build the REST store from these texts first, as OUT-rest; instead of --rest. " + CORPUS_HELP,
)  # fmt: skip
@click.option("--tokenizer", metavar="T", help="Needed with --corpus. " + TOKENIZER_HELP)
@truncated_option
@rehash_option
@out_option
@name_option
@click.option(
    "--max-n",
    type=click.IntRange(1, MAX_N),
    default=DEFAULT_MAX_N,
    show_default=True,
    help="Length of the longest n-grams, in tokens; with --select single, of all.",
)
@click.option(
    "--select",
    type=click.Choice(SELECTIONS),
    default=GAIN,
    show_default=True,
    help="N-grams to keep: those that save the most passes over the corpus (gain), the most common of one "
    "length (single), an equal number of the most common of each length (combined), the most common of all (global).",
)
@click.option(
    "--rule",
    type=click.Choice(list(RULES)),
    default=BACKOFF,
    show_default=True,
    help="How a tree is drawn: from all match lengths together, as the REST store drafts (backoff), or from what "
    "followed its n-gram alone (longest, CREST as published).",
)
@click.option(
    "--ngrams", type=click.IntRange(min=1), help=f"Number of n-grams to keep. [default: {DEFAULT_NGRAMS:,}]"
)
@click.option(
    "--max-bytes",
    type=ByteSize(),
    help="Keep as many n-grams as fit in a file of this size, such as 100MB; instead of --ngrams.",
)
@click.option(
    "--backend",
    type=click.Choice([*BACKENDS, "both"]),
    default=LMDB,
    show_default=True,
    help="Where to keep the trees; PostgreSQL is $DRAFTSTORE_DATABASE_URL, or an embedded server.",
)
@click.option(
    "--nodes", type=int, default=BUDGET, show_default=True, help="Maximum number of nodes in a tree."
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Number of threads that cut trees. [default: all cores]"
)
@overwrite_option
@json_option
def crest(
    rest: Path | None,
    corpus: tuple[Path, ...],
    tokenizer: str | None,
    allow_truncated: bool,
    rehash: bool,
    out: Path,
    name: str | None,
    max_n: int,
    select: str,
    rule: str,
    ngrams: int | None,
    max_bytes: int | None,
    backend: str,
    nodes: int,
    workers: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Build a CREST store: ready-made draft trees of the most useful n-grams, a hundredth of a REST store's size.

    \b
    Examples:
      draftstore build crest --rest stores/chat --out stores/chat-crest --max-bytes 10MB
      draftstore build crest --corpus chats.jsonl.zst --tokenizer ./llama2 --out stores/chat-crest
    """
    if (rest is None) == (not corpus):
        raise click.UsageError("Give either --rest with a REST store, or --corpus with --tokenizer.")
    options = CrestOptions(
        name=name or out.name,
        max_n=max_n,
        selection=select,
        ngrams=ngrams,
        max_bytes=max_bytes,
        backends=BACKENDS if backend == "both" else (backend,),
        nodes=nodes,
        rule=rule,
    )
    options.check()
    begin = time.perf_counter()
    beside = out.with_name(f"{out.name}-rest")
    texts = RestOptions(corpus=corpus, name=beside.name, allow_truncated=allow_truncated, rehash=rehash)
    source = rest or _build_rest(texts, tokenizer, beside, workers)
    with crest_bars() as progress:
        result = build_crest(options, source, out, overwrite=overwrite, workers=workers, progress=progress)
    report_build(result, time.perf_counter() - begin, as_json)


def _build_rest(options: RestOptions, tokenizer: str | None, out: Path, workers: int | None) -> Path:
    """Build the REST store beside the new one, or return the existing one."""
    if tokenizer is None:
        raise click.UsageError("--corpus needs --tokenizer, the one of the model that will decode.")
    with build_bars() as progress:
        return build_rest(options, load_tokenizer(tokenizer), out, workers=workers, progress=progress).path


@contextmanager
def crest_bars() -> Iterator[CrestProgress]:
    """Show one progress bar for each step of a build, on stderr."""
    with count_progress("") as bars:
        yield CrestProgress(
            counted=Bar(bars, "counting n-grams", "tokens").amount,
            packed=Bar(bars, "cutting trees", "done").amount,
            loaded=Bar(bars, "loading PostgreSQL", "entries").amount,
        )


@click.command()
@click.argument("directory", type=STORE)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory of the counts.")
@click.option(
    "--max-n",
    type=click.IntRange(1, MAX_N),
    default=DEFAULT_MAX_N,
    show_default=True,
    help="Length of the longest n-grams, in tokens.",
)
@cluster_option
@click.option("--overwrite", is_flag=True, help="Replace existing counts.")
@json_option
def count(
    directory: Path, out: Path, max_n: int, cluster: str | None, overwrite: bool, as_json: bool
) -> None:
    """Count all n-grams of a REST store, exactly, into Parquet files.

    \b
    Example:
      draftstore count stores/chat --out stores/chat-ngrams
    """
    begin = time.perf_counter()
    with open_pool(cluster) as pool, count_progress("") as bars:
        progress = Bar(bars, "counting n-grams", "tokens").amount
        result = build_counts(directory, out, max_n=max_n, overwrite=overwrite, pool=pool, progress=progress)
    report_build(result, time.perf_counter() - begin, as_json)

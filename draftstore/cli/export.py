"""`draftstore export`: what a store knows, as files of other programs."""

import time
from pathlib import Path

import click

from draftstore.cli.build import Bar
from draftstore.cli.common import (
    STORE,
    count_progress,
    json_option,
    print_json,
    printable,
    stderr_console,
)
from draftstore.cli.crest import ByteSize
from draftstore.engines.llama_cpp import export_cache
from draftstore.errors import counted


@click.group()
def export() -> None:
    """Write what a store knows as a file of another program.

    \b
    Example:
      draftstore export llama-cpp stores/chat --out chat.bin
    """


@export.command("llama-cpp")
@click.argument("directory", type=STORE)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file.")
@click.option(
    "--min-count",
    type=click.IntRange(min=1),
    help="Leave out pairs of tokens whose best follower occurs fewer times. [default and least: 2; for --all: 1]",
)
@click.option(
    "--max-bytes",
    type=ByteSize(),
    help="Keep as many pairs as fit into this size, such as 10MB: those whose drafts are right most often.",
)
@click.option(
    "--all",
    "whole",
    is_flag=True,
    help="Write all followers of all pairs, not only the one that llama.cpp drafts.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@json_option
def llama_cpp(
    directory: Path,
    out: Path,
    min_count: int | None,
    max_bytes: int | None,
    whole: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write what follows two tokens as a static cache for llama.cpp's lookup decoding.

    From a REST store, or from what `draftstore count` made of one. The file holds ids of the store's tokenizer: only
    models with the same tokenizer can use it.

    \b
    Example:
      draftstore export llama-cpp stores/chat --out chat.bin --max-bytes 10MB
      llama-server -m model.gguf --spec-type ngram-cache --lookup-cache-static chat.bin
    """
    begin = time.perf_counter()
    with count_progress("") as bars:
        made = export_cache(
            directory,
            out,
            whole=whole,
            min_count=min_count,
            max_bytes=max_bytes,
            overwrite=overwrite,
            progress=Bar(bars, "counting followers", "rows").amount,
        )
    seconds = time.perf_counter() - begin
    if as_json:
        found = {"ngrams": made.ngrams, "followers": made.followers, "left_out": made.left_out}
        print_json({"path": str(made.path), "bytes": made.size, "seconds": round(seconds, 2), **found})
        return
    pairs, followers = counted(made.ngrams, "pair"), counted(made.followers, "follower")
    left = f", {made.left_out:,} left out by --max-bytes" * bool(made.left_out)
    console = stderr_console()
    console.print(
        f"{pairs} of tokens, {followers}, {made.size:,} bytes, {seconds:.1f} s{left}", soft_wrap=True
    )
    click.echo(printable(made.path))

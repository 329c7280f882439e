"""`draftstore export`: the content of a store in the formats of other programs."""

import time
from pathlib import Path

import click

from draftstore.cli.common import STORE, progress_bars
from draftstore.cli.options import Group, takes
from draftstore.cli.output import json_option, print_json, say
from draftstore.engines.llama_cpp import ExportOptions, export_cache
from draftstore.errors import counted


@click.group(cls=Group)
def export() -> None:
    """Export a store to another program's format.

    \b
    Example:
      draftstore export llama-cpp stores/chat --out chat.bin
    """


@export.command("llama-cpp")
@click.argument("directory", type=STORE)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file.")
@takes(options=ExportOptions)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@json_option
def llama_cpp(directory: Path, out: Path, options: ExportOptions, overwrite: bool, as_json: bool) -> None:
    """Export followers of token pairs as a static cache for llama.cpp's lookup decoding.

    Takes a REST store, or its counts made by `draftstore count`. The file holds ids of the store's tokenizer: only
    models with the same tokenizer can use it. In memory it takes 17 times its size for each slot of llama-server.

    \b
    Example:
      draftstore export llama-cpp stores/chat --out chat.bin --max-bytes 10MB
      llama-server -m model.gguf --spec-type ngram-simple,ngram-cache --lookup-cache-static chat.bin --parallel 1 \\
          --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8
    """
    begin = time.perf_counter()
    with progress_bars() as progress:
        made = export_cache(directory, out, options, overwrite=overwrite, progress=progress)
    seconds = time.perf_counter() - begin
    if as_json:
        found = {"ngrams": made.ngrams, "left_out": made.left_out}
        return print_json({"path": made.path, "bytes": made.size, "seconds": round(seconds, 2), **found})
    left = f", {made.left_out:,} omitted due to --max-bytes" * bool(made.left_out)
    say(f"{counted(made.ngrams, 'pair')} of tokens, {made.size:,} bytes, {seconds:.1f} s{left}", err=True)
    return say(str(made.path))

"""`draftstore count`: counts of the n-grams of a REST store."""

import time
from pathlib import Path

import click

from draftstore.cli.build import report_build
from draftstore.cli.common import STORE, progress_bars
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option
from draftstore.stores.crest.counts import CountOptions, build_counts


@click.command(cls=Command)
@click.argument("directory", type=STORE)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory of the counts.")
@takes(options=CountOptions)
@click.option("--overwrite", is_flag=True, help="Replace existing counts.")
@json_option
def count(directory: Path, out: Path, options: CountOptions, overwrite: bool, as_json: bool) -> None:
    """Count all n-grams of a REST store, exactly, into Parquet files.

    \b
    Example:
      draftstore count stores/chat --out stores/chat-ngrams
    """
    begin = time.perf_counter()
    with progress_bars() as progress:
        result = build_counts(directory, out, options, overwrite=overwrite, progress=progress)
    report_build(result, time.perf_counter() - begin, as_json)

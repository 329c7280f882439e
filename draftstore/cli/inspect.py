"""`draftstore info` and `draftstore verify`: a store's description, and its verification."""

import dataclasses
import sys
from pathlib import Path

import click
from rich.table import Table

from draftstore.cli.common import (
    STORE,
    bytes_text,
    count_progress,
    json_option,
    print_json,
    printable,
    stdout_console,
)
from draftstore.errors import counted
from draftstore.storage.manifest import load_manifest
from draftstore.stores.registry import kind_of, verify_store


@click.command()
@click.argument("directory", type=STORE)
@json_option
def info(directory: Path, as_json: bool) -> None:
    """Show what a store holds, after checking that its files are there in full size.

    \b
    Example:
      draftstore info stores/chat
    """
    manifest = load_manifest(directory)
    if as_json:
        print_json({"path": str(directory), **dataclasses.asdict(manifest)})
        return
    table = Table(show_header=False, box=None)
    table.add_row(
        "store", f"{printable(manifest.name)} ({manifest.kind}, format version {manifest.format_version})"
    )
    table.add_row("created", manifest.created)
    table.add_row(
        "tokenizer", f"{manifest.tokenizer.name}, fingerprint {manifest.tokenizer.fingerprint[:12]}"
    )
    if manifest.target_model is not None:
        table.add_row("model", printable(manifest.target_model))
    table.add_row("vocabulary", f"{manifest.vocab_size:,} ids, {manifest.token_dtype}")
    table.add_row("corpus", ", ".join(map(printable, manifest.corpus.get("sources", []))))
    for key, noun in (("bad_records", "bad record"), ("empty_documents", "empty document")):
        if manifest.corpus.get(key):
            table.add_row("", f"{counted(manifest.corpus[key], noun)} left out")
    for key, value in manifest.counts.items():
        table.add_row(key, f"{value:,}")
    for key, text in kind_of(manifest.kind).info(manifest):
        table.add_row(key, text)
    table.add_row("bytes", bytes_text(manifest))
    for name, entry in sorted(manifest.files.items()):
        table.add_row("", f"{name}: {entry.size:,}")
    stdout_console().print(table)


@click.command()
@click.argument("directory", type=STORE)
@json_option
def verify(directory: Path, as_json: bool) -> None:
    """Read every byte of a store and compare it with the recorded hashes.

    Exit status 0 if the store is whole, 1 if not.

    \b
    Example:
      draftstore verify stores/chat && echo whole
    """
    manifest = load_manifest(directory)
    with count_progress("bytes") as bars:
        task = bars.add_task("verifying", total=manifest.size, detail="")
        problems = verify_store(directory, manifest, lambda size: bars.advance(task, size))
    if as_json:
        whole = {"path": str(directory), "whole": not problems, "bytes": manifest.size}
        print_json({**whole, "problems": problems})
    else:
        for problem in problems:
            click.echo(f"error: {problem}", err=True)
        if not problems:
            files = counted(len(manifest.files), "file")
            click.echo(f"{printable(directory)} is intact: {files}, {manifest.size:,} bytes")
    if problems:
        sys.exit(1)

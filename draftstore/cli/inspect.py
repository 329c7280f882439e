"""`draftstore info`, `verify` and `live`: the description and verification of a store, and the log of a live store."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from draftstore.cli.common import STORE, bytes_text, progress_bars
from draftstore.cli.output import json_option, print_fields, print_json, say
from draftstore.errors import DraftstoreError, counted
from draftstore.live import log, shared
from draftstore.live.store import LEAST_TOKENS
from draftstore.storage.manifest import Manifest, load_manifest
from draftstore.stores.registry import kind_of, verify_store


@click.command()
@click.argument("directory", type=STORE)
@json_option
def info(directory: Path, as_json: bool) -> None:
    """Show what a store holds, after checking the sizes of its files.

    \b
    Example:
      draftstore info stores/chat
    """
    manifest = load_manifest(directory)
    if as_json:
        print_json({"path": directory, **dataclasses.asdict(manifest)})
    else:
        print_fields(_fields(manifest))


def _fields(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    tokenizer, corpus = manifest.tokenizer, manifest.corpus
    yield "store", f"{manifest.name} ({manifest.kind}, format version {manifest.format_version})"
    yield "created", manifest.created
    yield "tokenizer", f"{tokenizer.name}, fingerprint {tokenizer.fingerprint[:12]}"
    yield "model", manifest.target_model
    yield "vocabulary", f"{manifest.vocab_size:,} ids, {manifest.token_dtype}"
    yield "corpus", corpus.get("sources", [])
    for key, noun in (("bad_records", "bad record"), ("empty_documents", "empty document")):
        if corpus.get(key):
            yield "", f"{counted(corpus[key], noun)} skipped"
    if filtered := corpus.get("filtered"):
        yield "", f"{counted(filtered, 'record')} filtered out"
    yield from manifest.counts.items()
    yield from kind_of(manifest.kind).info(manifest)
    yield "bytes", bytes_text(manifest)
    for name, entry in sorted(manifest.files.items()):
        yield "", f"{name}: {entry.size:,}"


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
    with progress_bars() as progress:
        problems = verify_store(directory, manifest, progress("verifying", "bytes"))
    if as_json:
        whole = {"path": directory, "whole": not problems, "bytes": manifest.size}
        print_json({**whole, "problems": problems})
    elif problems:
        for problem in problems:
            say(f"error: {problem}", err=True)
    else:
        say(f"{directory} is intact: {counted(len(manifest.files), 'file')}, {manifest.size:,} bytes")
    if problems:
        sys.exit(1)


@click.command()
@click.argument("directory", type=STORE)
@click.option(
    "--tokens",
    type=click.IntRange(LEAST_TOKENS, 2**31 - 1),
    help="Keep the log for a memory of so many tokens at most: the oldest documents beyond are deleted, now and later.",
)
@json_option
def live(directory: Path, tokens: int | None, as_json: bool) -> None:
    """Show the log of a live store, or lower its limit.

    A log is kept for the largest memory of the processes that have used it, up to 64 times the bytes of its ids. A
    process that starts with more TOKENS than the limit raises it again.

    \b
    Examples:
      draftstore live live/team
      draftstore live live/team --tokens 200000
    """
    if not (directory / "live.json").exists():
        raise DraftstoreError(
            f"{directory} is not the log of a live store: name the DIR of `--live NAME=DIR`"
        )
    deleted = log.limit(directory, tokens) if tokens else 0
    settings, size, count = shared.settings_of(directory), 0, 0
    for path in log.segments(directory):
        with suppress(FileNotFoundError):  # put to rest, or deleted
            size += path.stat().st_size
            count += sum(1 for _ in log.documents(path))
    found = {
        "path": directory, "tokenizer": settings.vocabulary and settings.vocabulary.fingerprint,
        "limit_tokens": settings.tokens, "limit_bytes": log.most_bytes(settings.tokens), "bytes": size,
        "documents": count, "deleted_documents": deleted,
    }  # fmt: skip
    print_json(found) if as_json else print_fields(found)

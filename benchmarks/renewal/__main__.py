"""The cost of renewing a store, and the value of more text: `python -m benchmarks.renewal`.

renewal   ShareGPT as a collection. Its last documents arrive later: first one percent in one batch, then as many over
          ten nights, while as many of the oldest are removed. Every step of the flow `rebuild` is timed against the
          same from scratch, each in its own data folder with an embedded PostgreSQL; drafts are compared byte by byte.
growth    M by tokens of stored text: nested samples of all chat corpora, and of the Python code of 71 packages, each
          with a REST store and CREST stores of 10 and 50 MB. Draws docs/growth.svg, unless --quick.

Stores of `growth` are kept in the work folder, so an interrupted run resumes. Tables first; the last line of stdout is
one JSON document; each part is also written to OUT/PART.json. Exit status 1 if drafts differ.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.renewal --work ~/bench --parts renewal
    DRAFTSTORE_TEST_DATA=~/data nice python -m benchmarks.renewal --work ~/bench --parts growth --kinds chat
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from benchmarks.common import (
    CHAT,
    TOKENIZER,
    VICUNA,
    Workspace,
    add_arguments,
    chosen,
    draw_contexts,
    open_workspace,
)
from benchmarks.measure import progress
from benchmarks.renewal.growth import TESTS, measure_growth
from benchmarks.report import describe_machine, save, show_rows
from draftstore.storage.streams import read_lines
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.kind import Workers
from draftstore.stores.rest.build import SEGMENT_TOKENS
from draftstore.stores.rest.store import MAX_MATCH, RestStore
from schema.collections.collecting import NewSource, add_sources, list_collections
from schema.db.database import migrate
from schema.db.embedded import HOME_VARIABLE, stop
from schema.renewal import making
from schema.renewal.ledger import Built, Ledger
from schema.renewal.stores import renew_rest
from schema.renewal.survey import survey

NAME = "chat"
NGRAMS, QUICK_NGRAMS = 100_000, 1_000
LATE = 0.01
"""Share of the documents that arrive later."""
NIGHTS, QUICK_NIGHTS = 10, 2
QUICK_DOCUMENTS = 2_000
Result = TypeVar("Result")


class Site:
    """A data folder with a collection.

    Attributes:
        texts: folder of its files.
        seconds: durations of the steps of the last rebuild.
    """

    def __init__(self, space: Workspace, name: str, texts: Path) -> None:
        """Start with an empty folder in the work folder."""
        self.texts, self.seconds = texts, dict[str, float]()
        self._folder, self._tokenizer = space.work / name, space.data / "tokenizers" / TOKENIZER
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Use the folder and its database in the block."""
        os.environ[HOME_VARIABLE] = str(self._folder)
        try:
            migrate()
            with Ledger() as ledger, ledger.session() as session:
                if not list_collections(session):
                    source = NewSource(place=str(self.texts), globs=("*.jsonl",))
                    add_sources(session, NAME, [source], str(self._tokenizer))
            yield
        finally:
            stop(self._folder)

    def rebuild(self, ngrams: int = 0) -> Built:
        """Run the steps of the flow, including CREST's if n-grams are requested; return the REST store."""
        self.seconds = {}
        with Ledger() as ledger:
            surveyed = self._timed("scan", lambda: survey(ledger, NAME, SEGMENT_TOKENS))
            rest, _ = self._timed("REST", lambda: renew_rest(ledger, surveyed, None))
            if ngrams:
                options = CrestOptions(name=f"{NAME}-crest", ngrams=ngrams)
                self._timed("counts", lambda: making.make_counts(ledger, NAME, rest, 5, 100_000))
                self._timed("CREST", lambda: making.make_store(ledger, "crest", options, Workers(), rest))
        return rest

    def _timed(self, name: str, do: Callable[[], Result]) -> Result:
        begin = perf_counter()
        result = do()
        self.seconds[name] = round(perf_counter() - begin, 3)
        return result


def measure_renewal(space: Workspace, *, quick: bool) -> dict[str, Any]:
    """Renew stores after one percent of new documents, and night by night; print the table."""
    path = space.data / "corpora" / CHAT.files[0]
    lines = [line.rstrip(b"\n") for line in read_lines(path, []) if line is not None]
    lines, ngrams = (lines[:QUICK_DOCUMENTS], QUICK_NGRAMS) if quick else (lines, NGRAMS)
    late, texts = round(len(lines) * LATE), space.work / "renewal-texts"
    renewed, anew = (Site(space, f"renewal-{name}", texts) for name in ("renewed", "anew"))
    _write(texts, {"day0": lines[:-late]}, fresh=True)
    progress("before")
    with renewed.opened():
        renewed.rebuild(ngrams)
    _write(texts, {"day1": lines[-late:]})
    stores = []
    for site in (renewed, anew):
        progress(f"{late:,} new documents")
        with site.opened():
            stores.append(site.rebuild(ngrams).path)
    figures = {
        "documents": len(lines),
        "new": late,
        "seconds": {"renewed": renewed.seconds, "anew": anew.seconds},
        "equal_drafts": _equal_drafts(space, *stores),
        **_nights(space, lines, QUICK_NIGHTS if quick else NIGHTS),
    }
    both = (
        {"step": step, "anew": value, "renewed": renewed.seconds[step]}
        for step, value in anew.seconds.items()
    )
    show_rows(f"{late:,} of {len(lines):,} documents are new: seconds", list(both))
    show_rows("nights", [{name: str(value) for name, value in figures.items() if "night" in name}])
    return figures


def _nights(space: Workspace, lines: Sequence[bytes], nights: int) -> dict[str, Any]:
    """Renew a store night by night; each night, as many documents arrive as are removed."""
    texts, step = space.work / "renewal-nights-texts", max(1, round(len(lines) * LATE / nights))
    site, plain = (Site(space, f"renewal-{name}", texts) for name in ("nights", "nights-anew"))
    held, seconds = len(lines) - nights * step, list[float]()
    days = {f"old{i}": lines[i * step : (i + 1) * step] for i in range(nights)}
    _write(texts, {**days, "rest": lines[nights * step : held]}, fresh=True)
    with site.opened():
        built = site.rebuild()
        for night in range(nights):
            progress(f"night {night + 1}")
            _write(texts, {f"new{night}": lines[held + night * step : held + (night + 1) * step]})
            (texts / f"old{night}.jsonl").unlink()
            built = site.rebuild()
            seconds.append(round(sum(site.seconds.values()), 3))
    with plain.opened():
        anew = plain.rebuild()
    return {
        "nights_seconds": seconds,
        "nights_anew_seconds": round(sum(plain.seconds.values()), 3),
        "nights_segments": built.manifest.counts["segments"],
        "nights_equal_drafts": _equal_drafts(space, built.path, anew.path),
    }


def _write(folder: Path, files: dict[str, Sequence[bytes]], fresh: bool = False) -> None:
    """Write records as files of a folder, emptying it first if `fresh`."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def _equal_drafts(space: Workspace, found: Path, expected: Path) -> bool:
    """Compare the drafts of two stores byte for byte at places in recorded outputs."""
    contexts = draw_contexts(space.recordings(VICUNA), 2_000, MAX_MATCH)
    drafts = [
        RestStore.open(path).drafter().draft_batch(contexts, 64).encode_trees() for path in (found, expected)
    ]
    return all(np.array_equal(one, other) for one, other in zip(*drafts, strict=True))


def main() -> None:
    """Run the parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.renewal", description=__doc__)
    add_arguments(parser)
    known = ("renewal", "growth")
    parser.add_argument("--parts", help=f"any of {','.join(known)} (default: all)")
    parser.add_argument(
        "--kinds", help=f"texts of growth, any of {','.join(TESTS)} (default: all; quick: chat)"
    )
    args = parser.parse_args()
    parts = chosen(parser, args.parts, known)
    kinds = chosen(parser, args.kinds or ("chat" if args.quick else None), TESTS)
    document: dict[str, Any] = describe_machine(["lmdb"]) | {"quick": args.quick}
    figures: dict[str, Any] = {}
    with open_workspace(args) as space:
        for part in parts:
            if part == "renewal":
                figures[part] = measure_renewal(space, quick=args.quick)
            else:
                figures[part] = measure_growth(space, kinds, quick=args.quick)
            save(args.out, part, document | figures[part])
    print(json.dumps(document | figures))
    renewal = figures.get("renewal", {})
    if not all(renewal.get(key, True) for key in ("equal_drafts", "nights_equal_drafts")):
        sys.exit(1)


if __name__ == "__main__":
    main()

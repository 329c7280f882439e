"""What renewing costs against building anew: `python -m benchmarks.renewal`.

The ShareGPT corpus becomes a collection. Its last documents come later: first one percent of them at once, then as many
in ten nights, while as many of the oldest go. Every step of the flow `rebuild` is timed against the same steps from
nothing, each in a data folder with an embedded PostgreSQL of its own. Drafts of the renewed store are compared with
those of the store that was built at once, byte for byte.

Tables first; the last line of stdout is one JSON document, also written to OUT/renewal.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.renewal --work ~/bench
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import psutil

from benchmarks.common import TOKENIZER, RecordingSet, Workspace, add_arguments, draw_contexts, open_workspace
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_table
from draftstore.storage.streams import read_lines
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.rest.build import SEGMENT_TOKENS
from draftstore.stores.rest.store import MAX_MATCH, RestStore
from pipelines import steps
from pipelines.ledger import Ledger
from pipelines.rebuilding import renew_rest, survey
from pipelines.reports import Built
from schema.collecting import NewSource, add_sources, list_collections
from schema.database import migrate
from schema.embedded import stop
from schema.home import HOME_VARIABLE

NAME = "chat"
NGRAMS = 100_000
LATE = 0.01
"""Share of the documents that come later."""
NIGHTS = 10

T = TypeVar("T")


class Site:
    """A data folder with a collection."""

    def __init__(self, folder: Path, tokenizer: Path, texts: Path) -> None:
        """Start anew in a folder.

        Args:
            folder: the data folder, emptied.
            tokenizer: its tokenizer.
            texts: folder of its texts.
        """
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self._tokenizer, self._texts = tokenizer, texts
        shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Use the folder and its database within a block."""
        os.environ[HOME_VARIABLE] = str(self.folder)
        try:
            migrate()
            with Ledger() as ledger, ledger.session() as session:
                if not list_collections(session):
                    add_sources(
                        session, NAME, [NewSource(str(self._texts), globs=("*.jsonl",))], str(self._tokenizer)
                    )
            yield
        finally:
            stop(self.folder)

    def rebuild(self, trees: bool = True) -> Built:
        """Run the steps of the flow; return the REST store."""
        self.seconds = {}
        with Ledger() as ledger:
            surveyed = self._timed("scan", lambda: survey(ledger, NAME, SEGMENT_TOKENS))
            rest, _ = self._timed("REST", lambda: renew_rest(ledger, surveyed, None))
            if trees:
                options = CrestOptions(f"{NAME}-crest", ngrams=NGRAMS)
                self._timed("counts", lambda: steps.make_counts(ledger, NAME, rest, 5, 100_000))
                self._timed("CREST", lambda: steps.make_crest(ledger, options, rest, None))
        return rest

    def _timed(self, name: str, do: Callable[[], T]) -> T:
        """Run a step and note how long it took."""
        begin = perf_counter()
        result = do()
        self.seconds[name] = round(perf_counter() - begin, 3)
        progress(f"  {name}: {self.seconds[name]:.1f} s")
        return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    with open_workspace(args) as workspace:
        lines = _lines(workspace, 2_000 if args.quick else None)
        result = describe_machine() | {"quick": args.quick, "load_average": psutil.getloadavg()[0]}
        result |= _one_percent(workspace, lines) | _nights(workspace, lines)
    finish(args.out, "renewal", result)


def _lines(workspace: Workspace, most: int | None) -> list[bytes]:
    """Return the records of the corpus."""
    path = workspace.data / "corpora" / "chat_sharegpt.jsonl.zst"
    return [line for line in read_lines(path) if line is not None][:most]


def _one_percent(workspace: Workspace, lines: Sequence[bytes]) -> dict[str, Any]:
    """Renew a store after one percent of new documents, and build the same from nothing."""
    texts, late = workspace.work / "texts", round(len(lines) * LATE)
    tokenizer = workspace.data / "tokenizers" / TOKENIZER
    sites = {name: Site(workspace.work / name, tokenizer, texts) for name in ("renewed", "anew")}
    _write(texts, {"day0": lines[:-late]})
    progress("before")
    with sites["renewed"].opened():
        sites["renewed"].rebuild()
    _write(texts, {"day0": lines[:-late], "day1": lines[-late:]}, keep=True)
    stores = {}
    for name, site in sites.items():
        progress(name)
        with site.opened():
            stores[name] = site.rebuild().path
    seconds = {name: site.seconds for name, site in sites.items()}
    equal = _equal_drafts(workspace, stores["renewed"], stores["anew"])
    parts = list(seconds["anew"])
    show_table(
        f"{late:,} of {len(lines):,} documents are new: seconds",
        ["step", "anew", "renewed", "share"],
        [
            [
                part,
                seconds["anew"][part],
                seconds["renewed"][part],
                seconds["renewed"][part] / seconds["anew"][part],
            ]
            for part in parts
        ],
    )
    progress(f"equal drafts: {equal}")
    return {"documents": len(lines), "new": late, "seconds": seconds, "equal_drafts": equal}


def _nights(workspace: Workspace, lines: Sequence[bytes]) -> dict[str, Any]:
    """Renew a store in ten nights, in each of which as many documents come as go."""
    texts, step = workspace.work / "nights-texts", max(1, round(len(lines) * LATE / NIGHTS))
    tokenizer = workspace.data / "tokenizers" / TOKENIZER
    site = Site(workspace.work / "nights", tokenizer, texts)
    held = len(lines) - NIGHTS * step
    days = {f"old{i}": lines[i * step : (i + 1) * step] for i in range(NIGHTS)}
    _write(texts, {**days, "rest": lines[NIGHTS * step : held]})
    seconds, sizes = [], []
    with site.opened():
        for night in range(NIGHTS + 1):
            progress(f"night {night}")
            if night:
                _write(
                    texts, {f"new{night}": lines[held + (night - 1) * step : held + night * step]}, keep=True
                )
                (texts / f"old{night - 1}.jsonl").unlink()
            built = site.rebuild(trees=False)
            seconds.append(sum(site.seconds.values()))
            sizes.append(built.manifest.size)
            last = built.path
    plain = Site(workspace.work / "nights-anew", tokenizer, texts)
    with plain.opened():
        anew = plain.rebuild(trees=False)
    equal = _equal_drafts(workspace, last, anew.path)
    figures = {
        "nights_seconds": [round(value, 3) for value in seconds],
        "nights_bytes_share": round(sizes[-1] / anew.manifest.size, 4),
        "nights_segments": built.manifest.counts["segments"],
        "nights_equal_drafts": equal,
    }
    progress(json.dumps(figures))
    return figures


def _write(folder: Path, files: dict[str, Sequence[bytes]], keep: bool = False) -> None:
    """Write records as files; those that are there stay, if so told."""
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        path = folder / f"{name}.jsonl"
        if not path.exists():
            path.write_bytes(b"\n".join(line.rstrip(b"\n") for line in lines) + b"\n")


def _equal_drafts(workspace: Workspace, found: Path, expected: Path) -> bool:
    """Compare the drafts of two stores, to the byte, at places of recorded outputs."""
    recordings = workspace.recordings(RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5"))
    contexts = draw_contexts(recordings, 2_000, MAX_MATCH)
    drafts = [
        RestStore.open(path).drafter().draft_batch(contexts, 64).encode_trees() for path in (found, expected)
    ]
    return all(np.array_equal(one, other) for one, other in zip(*drafts, strict=True))


if __name__ == "__main__":
    main()

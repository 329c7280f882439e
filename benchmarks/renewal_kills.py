"""Rebuilds that are killed: `python -m benchmarks.renewal_kills`.

A collection changes a little, and the steps of the flow `rebuild` run in a process of their own, with publishing and
pruning. At a random moment that process is killed, or the embedded PostgreSQL, or both. After each kill the live
releases must be whole, to the byte, and draft. In the end one run is left alone: it must come to an end, its store must
hold what the sources hold, and `draftstore doctor` must find nothing.

The last line of stdout is one JSON document, also written to OUT/renewal_kills.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.renewal_kills --kills 50
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import NullPool, text
from sqlalchemy.orm import sessionmaker

from benchmarks.common import SEED, TOKENIZER, add_arguments, open_workspace
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish
from draftstore.storage.streams import read_lines
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore
from draftstore.stores.rest.updating import read_documents
from draftstore.text.digests import digest_keys
from pipelines import steps
from pipelines.ledger import Ledger
from pipelines.rebuilding import renew_rest, survey
from schema import catalogue
from schema.collecting import NewSource, add_sources
from schema.database import make_engine, migrate
from schema.doctor import examine
from schema.embedded import stop
from schema.gates import CHECKS, Candidate
from schema.home import HOME_VARIABLE, data_home
from schema.publishing import Transaction, verify_build
from schema.releases import list_releases

NAME = "chat"
DOCUMENTS = 400
VICTIMS = ("rebuild", "rebuild", "database", "both")
CONTEXT = [319, 1799, 1546]


def rebuild() -> int:
    """Run the steps of the flow once; return the number of documents in the REST store."""
    with Ledger() as ledger:
        surveyed = survey(ledger, NAME, 1 << 20)
        rest, _ = renew_rest(ledger, surveyed, 1)
        steps.publish(ledger, NAME, rest, list(CHECKS))
        crest = steps.make_crest(ledger, CrestOptions(f"{NAME}-crest", max_n=3, ngrams=500), rest, 1)
        steps.publish(ledger, f"{NAME}-crest", crest, list(CHECKS))
        steps.prune(ledger, 1)
        return rest.manifest.counts["documents"]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--kills", type=int, default=50, help="how many (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        rebuild()
        return
    with open_workspace(args) as workspace:
        os.environ[HOME_VARIABLE] = str(workspace.work / "home")
        texts = workspace.work / "texts"
        texts.mkdir(exist_ok=True)
        path = workspace.data / "corpora" / "chat_sharegpt.jsonl.zst"
        lines = [line for line in itertools.islice(read_lines(path), 2 * DOCUMENTS) if line is not None]
        _write(texts, lines, 0)
        migrate()
        engine = make_engine(poolclass=NullPool)
        transaction = sessionmaker(engine, expire_on_commit=False).begin
        with transaction() as session:
            add_sources(
                session,
                NAME,
                [NewSource(str(texts), globs=("*.jsonl",))],
                str(workspace.data / "tokenizers" / TOKENIZER),
            )
        try:
            result = _run(transaction, texts, lines, 5 if args.quick else args.kills)
        finally:
            engine.dispose()
            stop(data_home())
    finish(args.out, "renewal_kills", describe_machine() | {"quick": args.quick} | result)


def _run(transaction: Transaction, texts: Path, lines: list[bytes], kills: int) -> dict[str, Any]:
    """Kill as often as told; return what was seen.

    Raises:
        SystemExit: something was lost.
    """
    moments = random.Random(SEED)
    rebuild()
    begin = time.perf_counter()
    _write(texts, lines, 1)
    _start().wait()
    whole = time.perf_counter() - begin
    done: Counter[str] = Counter()
    for kill in range(kills):
        _write(texts, lines, kill + 2)
        victim = VICTIMS[kill % len(VICTIMS)]
        process = _start()
        time.sleep(moments.uniform(0, whole))
        done["ended before" if process.poll() is not None else victim] += 1
        if victim != "rebuild":
            _kill_database()
        if victim != "database":
            process.kill()
        process.wait()
        _require_live(transaction)
        progress(f"kill {kill + 1} of {kills}: {victim}")
    with transaction() as session:
        states: dict[str, int] = dict(session.execute(text("SELECT state, count(*) FROM builds GROUP BY state")).all())
    if _start().wait() != 0:
        raise SystemExit("the last rebuild failed")
    held = _require_live(transaction)
    if held != len(_documents(lines, kills + 1)):
        raise SystemExit(f"the store holds {held} documents, expected {len(_documents(lines, kills + 1))}")
    catalogue.prune(transaction, data_home(), 1)
    findings = [finding.what for finding in examine(transaction, data_home(), verify_build)]
    if findings:
        raise SystemExit(f"draftstore doctor found: {findings}")
    return {
        "kills": kills,
        "by_victim": dict(done),
        "whole_seconds": round(whole, 2),
        "builds_before_the_end": states,
    }


def _documents(lines: list[bytes], day: int) -> list[bytes]:
    """Return the records of a day: three new ones, two fewer old ones than the day before."""
    return lines[2 * day : DOCUMENTS + 3 * day]


def _write(texts: Path, lines: list[bytes], day: int) -> None:
    """Replace the collection's file."""
    new = texts / "new"
    new.write_bytes(b"\n".join(line.rstrip(b"\n") for line in _documents(lines, day)) + b"\n")
    new.replace(texts / "texts.jsonl")


def _start() -> "subprocess.Popen[bytes]":
    """Start a rebuild in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.renewal_kills", "--once"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _kill_database() -> None:
    """Kill the postmaster of the embedded server."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command and command[0].endswith("postgres") and str(data_home()) in " ".join(command):
            process.send_signal(signal.SIGKILL)


def _require_live(transaction: Transaction) -> int:
    """Read every byte of the live stores, and draft from them; return the documents of the REST store.

    Raises:
        SystemExit: one is not whole.
    """
    with transaction() as session:
        live = {release.name: Candidate.of(release.build) for release in list_releases(session)}
    for name, build in live.items():
        problems = verify_build(build)
        if problems:
            raise SystemExit(f"release {name}: {problems}")
        store = open_store(Path(build.path))
        store.drafter().session(CONTEXT).propose(8)
        store.close()
    return len(set(digest_keys(read_documents(RestStore.open(live[NAME].path))).tolist()))


if __name__ == "__main__":
    main()

"""Where stores are built: a locked directory `.NAME.partial` beside the output, published by one rename.

    build.json           what is being built; another corpus, tokenizer or option starts clean
    store/               the store, published when it is whole
    ...                  markers and intermediate files of the kind of build

A killed build leaves no store that opens; the same command again finds the directory and goes on from it.
"""

import dataclasses
import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftstore.errors import BuildError, DraftstoreError, StoreError
from draftstore.storage.files import locked_directory, publish_directory, remove, retired_name, write_json
from draftstore.storage.manifest import FORMAT_VERSION, MANIFEST_NAME, FileEntry, Manifest, load_manifest
from draftstore.storage.report import ReadReport

PLAN = "build.json"
STORE = "store"
FINISHED = "finished.json"
"""Marker: the store is about to be published, or has been."""
WORTH_KEEPING = ("tokens/shard-*.json", f"{STORE}/{MANIFEST_NAME}")
"""What a failed build is gone on from; one without any of it leaves nothing."""


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """A finished store.

    Attributes:
        path: where it is.
        manifest: what it says of itself.
        report: what was read and what was left out; the problems themselves only where they were met.
        reused: the store was there already.
    """

    path: Path
    manifest: Manifest
    report: ReadReport
    reused: bool


def build_store(
    out: Path, plan: dict[str, Any], name: str, overwrite: bool, fill: Callable[[Path], ReadReport]
) -> BuildResult:
    """Build a store, go on with an interrupted build of the same, or return the one that is there.

    Args:
        out: directory of the store; its parent is made if absent.
        plan: what decides the bytes of the store, as JSON values; `kind` is one of them. The manifest keeps it as the
            parameter `plan`.
        name: name of the store.
        overwrite: replace a store that is there, even one of this very build.
        fill: makes the directory `store` in the working directory a whole store, going on from what is there.

    Raises:
        BuildError: `out` holds something else, or another build is at work there.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    finished = _find_finished(out, plan, name, overwrite)
    if finished is None:
        with _working_directory(out) as partial:
            # Asked again: another build may have ended between the question and the lock.
            finished = _find_finished(out, plan, name, overwrite)
            if finished is None:
                _start(partial, plan)
                report = fill(partial)
                write_json(partial / FINISHED, {})
                publish_directory(partial / STORE, out)
                return BuildResult(out, load_manifest(out, plan["kind"]), report, reused=False)
    elif _has_leftovers(out):
        with _working_directory(out):
            pass
    return BuildResult(out, finished, _report_of(finished), reused=True)


def _report_of(manifest: Manifest) -> ReadReport:
    """Return what a store tells of the reading of its corpus."""
    corpus = manifest.corpus
    return ReadReport(
        manifest.counts["documents"],
        corpus["bad_records"],
        corpus["empty_documents"],
        unread=corpus.get("unread", []),
        passed_over=corpus.get("passed_over", {}),
    )


def _find_finished(out: Path, plan: dict[str, Any], name: str, overwrite: bool) -> Manifest | None:
    """Return the manifest of a store at `out` that this very build made; None if there is one to build.

    Raises:
        BuildError: something else is there, and may not be replaced.
    """
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return None
    if overwrite:
        if (out / MANIFEST_NAME).is_file():
            return None
        raise BuildError(f"{out} is not a store, and only stores are overwritten: choose another --out")
    try:
        manifest = load_manifest(out, plan["kind"])
    except StoreError:
        manifest = None
    if manifest is None or manifest.name != name or manifest.parameters.get("plan") != plan:
        raise BuildError(f"{out} exists and is not this build: choose another --out, or pass --overwrite")
    return manifest


def _has_leftovers(out: Path) -> bool:
    """Tell whether a build was killed between publishing its store and removing what it worked with."""
    partial = _partial_name(out)
    published = (partial / FINISHED).exists() and not (partial / STORE).exists()
    emptied = partial.exists() and not (partial / PLAN).exists()
    return published or emptied or os.path.lexists(retired_name(out))


def _partial_name(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


@contextmanager
def _working_directory(out: Path) -> Iterator[Path]:
    """Lock the working directory; remove it, and what publishing left, if the work in it succeeds.

    It is removed also if the work failed without anything to go on from.
    """
    partial = _partial_name(out)
    with locked_directory(partial):
        try:
            yield partial
        except DraftstoreError:
            if not any(any(partial.glob(pattern)) for pattern in WORTH_KEEPING):
                _discard(partial)
            raise
        remove(retired_name(out))
        _discard(partial)


def _discard(partial: Path) -> None:
    """Remove the working directory."""
    remove(partial / PLAN)  # first: without it the rest is waste
    remove(partial)


def _start(partial: Path, plan: dict[str, Any]) -> None:
    """Empty the working directory unless it is of this build."""
    marker = partial / PLAN
    state = {"format_version": FORMAT_VERSION, **plan}
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == state:
        return
    for path in partial.iterdir():
        remove(path)
    write_json(marker, state)


def hash_files(
    store: Path, on_bytes: Callable[[int, int], None] = lambda _done, _all: None
) -> dict[str, FileEntry]:
    """Measure all files of a store, for its manifest; `on_bytes` is told the bytes hashed and those in all."""
    paths = sorted(path for path in store.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    files, done = {}, 0
    for path in paths:
        entry = files[path.relative_to(store).as_posix()] = FileEntry.of(path)
        done += entry.size
        on_bytes(done, total)
    return files


def build_time() -> str:
    """Return the time of the build; SOURCE_DATE_EPOCH, if set, makes even manifests reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.UTC)
    if epoch:
        now = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC)
    return now.isoformat(timespec="seconds")

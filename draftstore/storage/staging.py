"""Resumable builds: a locked directory `.NAME.partial` beside the output, published by one rename.

    build.json           plan of the build; another corpus, tokenizer or option starts anew
    store/               the store, published when complete
    ...                  markers (`once`) and intermediate files of the kind of build

A killed build leaves no store that opens; the same command again finds the directory and resumes.
"""

import dataclasses
import datetime
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from draftstore.errors import BuildError, DraftstoreError, StoreError
from draftstore.storage.access import denied_bits, deny
from draftstore.storage.files import (
    json_text,
    locked_directory,
    publish,
    remove,
    retired_name,
    write_atomic,
    write_json,
)
from draftstore.storage.manifest import FORMAT_VERSION, MANIFEST_NAME, FileEntry, Manifest, load_manifest
from draftstore.storage.report import ReadReport

PLAN = "build.json"
STORE = "store"
FINISHED = "finished.json"
"""Marker: the store is about to be published, or has been."""
RESUMABLE = (
    "tokens/shard-*.json",
    "parts/*/*/documents.json",
    f"{STORE}/{MANIFEST_NAME}",
)
"""Files to resume a failed build from; one without any of them leaves nothing."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """A finished store; `reused` if it existed already, and else with the problems of the reading in its report."""

    path: Path
    manifest: Manifest
    report: ReadReport
    reused: bool


def build_store(
    out: Path,
    plan: dict[str, Any],
    name: str,
    overwrite: bool,
    fill: Callable[[Path], ReadReport],
    *,
    sources: Callable[[], Iterable[Path]] = tuple,
) -> BuildResult:
    """Build a store, resume an interrupted build of it, or return the existing one.

    Args:
        plan: everything that determines the bytes of the store, as JSON values, including `kind`. The manifest keeps it
            as the parameter `plan`.
        overwrite: whether to replace an existing store, even one of the same build.
        fill: completes the directory `store` in the working directory, resuming from its content.
        sources: returns the files that the store is built from: the store gets no permission that one of them denies.

    Raises:
        BuildError: `out` is something else, or another build is running there.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    found = _find_finished(out, plan, name, overwrite)
    if found is not None and not _has_leftovers(out):
        return _reused(out, found)
    with _working_directory(out) as partial:
        # Checked again: another build may have ended just before the lock was taken.
        found = found or _find_finished(out, plan, name, overwrite)
        if found is not None:
            return _reused(out, found)
        _start(partial, plan)
        bits = denied_bits(sources())
        report = fill(partial)
        deny(partial / STORE, bits)
        manifest = load_manifest(partial / STORE, plan["kind"])
        write_json(partial / FINISHED, {})
        publish(partial / STORE, out)
    return BuildResult(out, manifest, report, reused=False)


def _reused(out: Path, manifest: Manifest) -> BuildResult:
    report = ReadReport.of_facts(manifest.counts["documents"], manifest.corpus)
    return BuildResult(out, manifest, report, reused=True)


def once(marker: Path, do: Callable[[], T], still: Callable[[Any], bool] = lambda _: True) -> T:
    """Run a step of a build unless an earlier attempt has completed it; return its result, now or then.

    The marker is written last, with the result: a JSON value or None. A completed step is repeated unless `still` says
    that its result is valid.
    """
    if marker.exists():
        text = marker.read_text(encoding="utf-8")
        value: T = json.loads(text or "null")
        if still(value):
            return value
        marker.unlink()
    value = do()
    write_atomic(marker, b"" if value is None else json_text(value).encode())
    return value


def _find_finished(out: Path, plan: dict[str, Any], name: str, overwrite: bool) -> Manifest | None:
    """Return the manifest of a store at `out` from the same build; None if it must be built."""
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
        raise BuildError(f"{out} exists and is another build: choose another --out, or pass --overwrite")
    return manifest


def _has_leftovers(out: Path) -> bool:
    """Return True if a build was killed between publishing its result and removing its working directory."""
    partial = _partial_name(out)
    published = (partial / FINISHED).exists() and not (partial / STORE).exists()
    emptied = partial.exists() and not (partial / PLAN).exists()
    return published or emptied or os.path.lexists(retired_name(out))


def _partial_name(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


@contextmanager
def _working_directory(out: Path) -> Iterator[Path]:
    """Lock the working directory; remove it after success, or after a failure that left nothing to resume from."""
    partial = _partial_name(out)
    with locked_directory(partial):
        partial.chmod(0o700)  # it may hold what only this user may read
        try:
            yield partial
        except DraftstoreError:
            if not any(any(partial.glob(pattern)) for pattern in RESUMABLE):
                _discard(partial)
            raise
        remove(retired_name(out))
        _discard(partial)


def _discard(partial: Path) -> None:
    remove(partial / PLAN)  # first: without it the rest is garbage
    remove(partial)


def _start(partial: Path, plan: dict[str, Any]) -> None:
    """Empty the working directory unless it belongs to this build."""
    state = {"format_version": FORMAT_VERSION, **plan}

    def empty() -> dict[str, Any]:
        for path in partial.iterdir():
            remove(path)
        return state

    once(partial / PLAN, empty, still=lambda found: bool(found == state))


def hash_files(
    store: Path, on_bytes: Callable[[int, int], None] = lambda _done, _all: None
) -> dict[str, FileEntry]:
    """Measure all files of a store for its manifest; `on_bytes` gets the bytes hashed and the total."""
    paths = sorted(path for path in store.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    files, done = {}, 0
    for path in paths:
        entry = files[path.relative_to(store).as_posix()] = FileEntry.of(path)
        done += entry.size
        on_bytes(done, total)
    return files


def require_space(folder: Path, needed: int) -> None:
    """Refuse to write `needed` bytes to a disk without space for them.

    Raises:
        BuildError: not enough disk space.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BuildError(
            f"{folder} needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: make room and run the "
            "command again, finished steps are kept"
        )


def build_time() -> str:
    """Return the time of the build; SOURCE_DATE_EPOCH, if set, makes even manifests reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.UTC)
    if epoch:
        now = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC)
    return now.isoformat(timespec="seconds")

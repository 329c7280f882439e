"""Resumable builds: a locked directory `.NAME.partial` beside the output, published by one rename.

    build.json           plan of the build; another corpus, tokenizer or option restarts it
    store/               the store, published when complete
    replaced/            the store that it replaces, between the rename and its removal
    ...                  markers (`once`) and intermediate files of this kind of build

A killed build leaves no store that can be opened; running the same command again resumes it.
"""

import dataclasses
import datetime
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from draftstore.errors import BuildError, DraftstoreError, StoreError
from draftstore.storage.files import (
    denied_bits,
    deny,
    json_text,
    locked_directory,
    publish,
    remove,
    write_atomic,
    write_json,
)
from draftstore.storage.locks import exclusive
from draftstore.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    load_manifest,
    read_manifest,
)
from draftstore.storage.report import OnProgress, ReadReport, ignore

PLAN = "build.json"
STORE = "store"
REPLACED = "replaced"
FINISHED = "finished.json"
"""Marker: the store is about to be or has been published."""
RESUMABLE = (
    "tokens/shard-*.json", "tokens/parts-*/[0-9]*", "parts/sorted-*", "report.json", f"{STORE}/{MANIFEST_NAME}"
)  # fmt: skip
"""Files from which a failed build can resume; a build without any of them is discarded."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """A finished store; `reused` if it existed already. Only the report of a new one lists the problems of reading."""

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

    The plan, in JSON values, is everything that determines the bytes of the store, including `kind`; the manifest
    records it as the parameter `plan`. `fill` completes the directory `store` in the given working directory, resuming
    from its content. The store gets no permission that one of its source files denies. `overwrite` replaces an existing
    store, even one of the same build. BuildError if `out` is something else, or another build is running there.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    partial = out.with_name(f".{out.name}.partial")
    found = _find_finished(out, plan, name, overwrite)
    if found is not None and not _has_leftovers(partial):
        return _reused(out, found)
    with _working_directory(partial, out):
        # Check again: another build may have finished just before the lock was acquired.
        found = found or _find_finished(out, plan, name, overwrite)
        if found is not None:
            return _reused(out, found)
        _start(partial, plan)
        bits = denied_bits(sources())
        report = fill(partial)
        deny(partial / STORE, bits)
        manifest = load_manifest(partial / STORE, plan["kind"])
        write_json(partial / FINISHED, {})
        with _free(out):
            publish(partial / STORE, out, partial / REPLACED)
    return BuildResult(out, manifest, report, reused=False)


def _reused(out: Path, manifest: Manifest) -> BuildResult:
    report = ReadReport.of_facts(manifest.counts["documents"], manifest.corpus)
    return BuildResult(out, manifest, report, reused=True)


def once(marker: Path, do: Callable[[], T], is_valid: Callable[[Any], bool] = lambda _: True) -> T:
    """Run a step of a build unless an earlier attempt has completed it; return its result in either case.

    The marker is written last, with the result: a JSON value or None. A completed step is repeated unless `is_valid`
    confirms that its result is valid.
    """
    if marker.exists():
        text = marker.read_text(encoding="utf-8")
        value: T = json.loads(text or "null")
        if is_valid(value):
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
        try:
            read_manifest(out)
        except StoreError as error:
            raise BuildError(
                f"only stores can be overwritten, but {error}: choose another folder", "out"
            ) from None
        with _free(out):
            return None
    try:
        manifest = load_manifest(out, plan["kind"])
    except StoreError:
        manifest = None
    if manifest is None or manifest.name != name or manifest.parameters.get("plan") != plan:
        raise BuildError(
            f"{out} exists and is another build: choose another folder, or replace it", "overwrite"
        )
    return manifest


@contextmanager
def _free(out: Path) -> Iterator[None]:
    """Lock out readers of a store that is to be replaced; BuildError if it is open."""
    with exclusive(out) as free:
        if not free:
            raise BuildError(
                f"{out} is open in another process: stop it before overwriting the store, or choose another folder",
                "out",
            )
        yield


def _has_leftovers(partial: Path) -> bool:
    """Return True if a build was killed between publishing its result and removing its working directory."""
    published = (partial / FINISHED).exists() and not (partial / STORE).exists()
    return published or (partial.exists() and not (partial / PLAN).exists())


@contextmanager
def _working_directory(partial: Path, out: Path) -> Iterator[None]:
    """Lock the working directory; remove it after success, or after a failure that left nothing to resume from."""
    with locked_directory(partial):
        partial.chmod(0o700)  # it may contain data that only this user may read
        _clear_replaced(partial / REPLACED, out)
        try:
            yield
        except DraftstoreError:
            if not any(any(partial.glob(pattern)) for pattern in RESUMABLE):
                _discard(partial)
            raise
        _clear_replaced(partial / REPLACED, out)
        _discard(partial)


def _clear_replaced(replaced: Path, out: Path) -> None:
    """Remove a replaced store, and move foreign files to the same path in `out`, or with `~` if that is taken.

    If a build was killed before it published the new store, the replaced one goes back.
    """
    if not os.path.lexists(replaced):
        return
    if not os.path.lexists(out):
        replaced.rename(out)
        return
    if not replaced.is_symlink():
        if (replaced / MANIFEST_NAME).exists():
            remove_store(replaced)
        for path in sorted(replaced.rglob("*")):
            if path.is_symlink() or not path.is_dir():
                target = out / path.relative_to(replaced)
                while os.path.lexists(target):
                    target = target.with_name(f"{target.name}~")
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
    remove(replaced)


def _discard(partial: Path) -> None:
    remove(partial / PLAN)  # first: without it, the rest is garbage
    remove(partial)


def _start(partial: Path, plan: dict[str, Any]) -> None:
    """Empty the working directory unless it belongs to this build."""
    state = {"format_version": FORMAT_VERSION, **plan}

    def empty() -> dict[str, Any]:
        for path in partial.iterdir():
            remove(path)
        return state

    once(partial / PLAN, empty, is_valid=lambda found: bool(found == state))


def remove_store(directory: Path) -> list[Path]:
    """Remove the files listed in a store's manifest and folders left empty; return the remaining files.

    The manifest is removed last: an interrupted removal leaves a store that does not open and can be removed again.
    StoreError if there is no store, or a process has it open.
    """
    with exclusive(directory) as free:
        if not free:
            raise StoreError(f"{directory} is open in another process: stop it first")
        within = directory.resolve()
        for name in [*read_manifest(directory).files, MANIFEST_NAME]:
            path = directory / name
            if path.parent.resolve().is_relative_to(within):  # not through a link out of the store
                path.unlink(missing_ok=True)
        for folder, _, _ in os.walk(directory, topdown=False):
            with suppress(OSError):  # not empty
                Path(folder).rmdir()
    return sorted(path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink())


def hash_files(store: Path, on_bytes: OnProgress = ignore) -> dict[str, FileEntry]:
    """Measure all files of a store for its manifest; `on_bytes` receives the bytes hashed and the total."""
    paths = sorted(path for path in store.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    files, done = {}, 0
    for path in paths:
        entry = files[path.relative_to(store).as_posix()] = FileEntry.of(path)
        done += entry.size
        on_bytes(done, total)
    return files


def require_space(folder: Path, needed: int) -> None:
    """Check that a disk has space for `needed` bytes; BuildError if it has not."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BuildError(
            f"{folder} needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: make room and run the "
            "command again; finished steps are kept"
        )


def build_time() -> str:
    """Return the time of the build: now, or SOURCE_DATE_EPOCH if set, which makes even manifests reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.UTC)
    if epoch:
        now = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC)
    return now.isoformat(timespec="seconds")

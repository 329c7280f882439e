"""Objects of a store such as S3, mirrored into a folder: read as local files, fetched only where they changed.

mirror.json      by object: its tag (ETag, or size and time) and size, written after every object
objects/...      the objects under their names below the URL
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from draftstore.errors import CorpusError, MissingExtraError, needs_extra
from draftstore.storage.files import fsync_path, remove, write_json

STATE = "mirror.json"
OBJECTS = "objects"
MODE = 0o600
TAGS = ("ETag", "etag", "checksum", "md5", "LastModified", "last_modified", "mtime", "created")
"""What may tell that an object changed, the best first."""


class Mirrored(NamedTuple):
    """A mirror that is up to date.

    Attributes:
        path: folder of the objects, or the file if the URL is one object.
        fetched: how many objects were fetched.
        removed: how many are gone.
        objects: how many there are.
    """

    path: Path
    fetched: int
    removed: int
    objects: int


def is_url(place: str) -> bool:
    """Return True if a place is a URL, such as `s3://bucket/prefix`."""
    scheme, found, _ = place.partition("://")
    return bool(found) and scheme.isalnum()


def mirror(
    url: str,
    folder: Path,
    *,
    options: dict[str, Any] | None = None,
    on_object: Callable[[int, int], None] = lambda _done, _all: None,
) -> Mirrored:
    """Bring a folder up to date with the objects under a URL; an interrupted call goes on where it was.

    If another process is doing so, this one waits until that has ended.

    Args:
        url: a prefix or an object, of any protocol that fsspec knows: `s3://bucket/prefix`.
        folder: of this URL alone, private; created if missing.
        options: of the file system, such as `endpoint_url`; the environment holds credentials.
        on_object: called with the objects looked at and their number.

    Raises:
        CorpusError: nothing is there, it cannot be reached, or an object has a name that is no path.
        MissingExtraError: the package for this protocol is not installed.
    """
    with needs_extra("fsspec", "s3"):
        import fsspec.core
    try:
        system, root = fsspec.core.url_to_fs(url, **(options or {}))
        system.invalidate_cache()
        listed = system.find(root, detail=True)
    except ImportError as error:
        raise MissingExtraError("s3fs" if url.startswith("s3") else str(error), "s3") from None
    except Exception as error:  # noqa: BLE001 (every protocol has errors of its own)
        raise CorpusError(f"{url} cannot be listed: {error}") from None
    objects = {
        _below(name, root): (name, facts)
        for name, facts in listed.items()
        if facts["type"] == "file" and not name.endswith("/")  # consoles of S3 make such ones for folders
    }
    if not objects:
        raise CorpusError(f"{url} holds no objects: is the prefix right?")
    _require_paths(objects)
    (folder / OBJECTS).mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(folder):
        fetched, removed = _update(system, objects, folder, on_object)
    single = list(objects) == [PurePosixPath(root).name] and system.isfile(root)
    path = folder / OBJECTS / next(iter(objects)) if single else folder / OBJECTS
    return Mirrored(path, fetched, removed, len(objects))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process mirrors into a folder, and keep it so during the block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _update(
    system: Any,
    objects: dict[str, tuple[str, dict[str, Any]]],
    folder: Path,
    on_object: Callable[[int, int], None],
) -> tuple[int, int]:
    """Fetch what changed and remove what is gone; return the numbers of both."""
    state = _read_state(folder)
    gone = [name for name in state if name not in objects]
    for name in gone:
        _forget(folder / OBJECTS, name)
        del state[name]
    fetched = 0
    for done, (name, (full, facts)) in enumerate(sorted(objects.items()), start=1):
        tag, target = _tag(facts), folder / OBJECTS / name
        if state.get(name) != tag or not target.is_file():
            _fetch(system, full, target)
            fetched += 1
            state[name] = tag
            write_json(folder / STATE, state)
        on_object(done, len(objects))
    if gone:
        write_json(folder / STATE, state)
    return fetched, len(gone)


def _forget(objects: Path, name: str) -> None:
    """Remove an object, and the folders that are empty then: an object may come to have their name."""
    remove(objects / name)
    for parent in PurePosixPath(name).parents[:-1]:
        with suppress(OSError):
            (objects / parent).rmdir()


def _require_paths(names: Iterable[str]) -> None:
    """Refuse objects that cannot be files at the same time."""
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if both := sorted(folders.intersection(names)):
        raise CorpusError(
            f"the object {both[0]!r} has the name of a folder of others: rename it, or name others"
        )


def _below(name: str, root: str) -> str:
    """Return the name of an object below the URL; its own if it is the URL."""
    below = name.removeprefix(root).strip("/") or PurePosixPath(name).name
    if ".." in PurePosixPath(below).parts or "\0" in below:
        raise CorpusError(f"the object {name!r} has a name that is no path: rename it, or name others")
    return below


def _tag(facts: dict[str, Any]) -> list[str]:
    """Return what tells whether an object changed."""
    tag = next((str(facts[key]).strip('"') for key in TAGS if facts.get(key)), "")
    return [tag, str(facts.get("size"))]


def _fetch(system: Any, name: str, target: Path) -> None:
    """Fetch an object; the file is whole or as it was."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    filling = target.with_name(f".{target.name}.tmp")
    try:
        filling.touch(MODE)
        system.get_file(name, str(filling))
        fsync_path(filling)
        filling.replace(target)
    except Exception as error:  # noqa: BLE001 (every protocol has errors of its own)
        raise CorpusError(f"{name} cannot be fetched: {error}") from None
    finally:
        filling.unlink(missing_ok=True)


def _read_state(folder: Path) -> dict[str, list[str]]:
    """Return the tags of the objects; none if the state is missing or damaged."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}

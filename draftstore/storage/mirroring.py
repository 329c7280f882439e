"""Objects of a store such as S3, mirrored to a folder: read as local files, fetched only if changed.

mirror.json      tag (ETag, or time) and size of each object, written after every batch
objects/...      the objects, named by their paths below the URL
fetching/...     the objects of the current batch
"""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from draftstore.errors import CorpusError, MissingExtraError, needs_extra
from draftstore.storage.files import fsync_path, load_json, remove, write_json
from draftstore.storage.locks import lock

STATE = "mirror.json"
STATES = TypeAdapter(dict[str, str])
OBJECTS = "objects"
FETCHING = "fetching"
BATCH, BATCHES = 1_000, 16
"""Minimum objects per batch, and about the maximum batches: the state, written after each, grows with the objects."""
MODE = 0o600
TAGS = ("ETag", "etag", "checksum", "md5", "LastModified", "last_modified", "mtime", "created")
"""Metadata that can reveal that an object changed, the best first."""
NAME_BYTES, PATH_BYTES = 255, 1024
"""Longest name and path of an object that keeps its own; most file systems allow no longer names."""


class Mirrored(NamedTuple):
    """A mirror that is up to date, and how many objects were fetched and removed, of all.

    `path` is the folder of the objects, or the file if the URL is one object.
    """

    path: Path
    fetched: int
    removed: int
    objects: int


def is_url(place: str) -> bool:
    """Return True if a place is a URL, such as `s3://bucket/prefix`."""
    scheme, found, _ = place.partition("://")
    return bool(found) and scheme.isalnum()


def mirror(url: str, folder: Path, *, options: dict[str, Any] | None = None) -> Mirrored:
    """Bring a private folder up to date with the objects under a URL, of any protocol that fsspec supports.

    An interrupted call resumes after its last batch; if another process is updating the folder, wait for it to finish.
    The options are the file system's, such as `endpoint_url`; credentials come from the environment. CorpusError if
    nothing is there, or it cannot be reached; MissingExtraError if the package for the protocol is not installed.
    """
    with needs_extra("fsspec", "s3"):
        import fsspec.core
    try:
        system, root = fsspec.core.url_to_fs(url, **(options or {}))
        system.invalidate_cache()
        listed = system.find(root, detail=True)
    except ImportError as error:
        raise MissingExtraError("s3fs" if url.startswith("s3") else str(error), "s3") from None
    except Exception as error:  # noqa: BLE001 (every protocol has its own errors)
        raise CorpusError(f"{url} cannot be listed: {error}") from None
    # S3 consoles create objects with a slash at the end for folders.
    names = sorted(name for name, facts in listed.items() if facts["type"] == "file" and name[-1:] != "/")
    if not names:
        raise CorpusError(f"{url} holds no objects: is the prefix correct?")
    single = names == [root]
    above = root.rpartition("/")[0] if single else root.rstrip("/")
    places = _places([name.removeprefix(above)[1:] for name in names])
    objects = {place: (name, _tag(listed[name])) for place, name in zip(places, names, strict=True)}
    (folder / OBJECTS).mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock(folder):
        fetched, removed = _update(system, objects, folder)
    path = folder / OBJECTS / places[0] if single else folder / OBJECTS
    return Mirrored(path, fetched, removed, len(objects))


def _update(system: Any, objects: dict[str, tuple[str, str]], folder: Path) -> tuple[int, int]:
    """Fetch changed objects and remove deleted ones; return the numbers of both."""
    try:
        state = load_json((folder / STATE).read_bytes(), STATES)
    except (OSError, ValueError):
        state = {}
    removed = _forget(folder, state, state.keys() - objects.keys())
    if removed:
        write_json(folder / STATE, state)
    changed = [
        name
        for name, (_, tag) in objects.items()
        if state.get(name) != tag or not (folder / OBJECTS / name).is_file()
    ]
    fetched, size = 0, max(BATCH, -(-len(objects) // BATCHES))
    for start in range(0, len(changed), size):
        batch = changed[start : start + size]
        found = _fetch(system, {name: objects[name][0] for name in batch}, folder)
        state |= {name: objects[name][1] for name in found}
        removed += _forget(folder, state, state.keys() & (set(batch) - found))  # vanished after the listing
        fetched += len(found)
        write_json(folder / STATE, state)
    return fetched, removed


def _fetch(system: Any, names: dict[str, str], folder: Path) -> set[str]:
    """Fetch objects and return the names of those that still exist; each file is replaced atomically."""
    filling, objects = folder / FETCHING, folder / OBJECTS
    remove(filling)
    filling.mkdir(mode=0o700)
    places = {name: filling / str(number) for number, name in enumerate(names)}
    try:
        system.get(list(names.values()), [str(path) for path in places.values()])
    except Exception:  # noqa: BLE001 (which object failed, and whether it is gone, shows only one at a time)
        for name, path in places.items():
            try:
                system.get_file(names[name], str(path))
            except FileNotFoundError:
                path.unlink(missing_ok=True)
            except Exception as error:  # noqa: BLE001 (every protocol has its own errors)
                raise CorpusError(f"{names[name]} cannot be fetched: {error}") from None
    found = {name: path for name, path in places.items() if path.exists()}
    for name, path in found.items():
        path.chmod(MODE)
        fsync_path(path)
        (objects / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.replace(objects / name)
    shutil.rmtree(filling)
    return set(found)


def _forget(folder: Path, state: dict[str, str], names: Set[str]) -> int:
    """Remove objects and folders left empty: a later object may have the name of such a folder."""
    objects = folder / OBJECTS
    for name in names:
        del state[name]
        remove(objects / name)
        for parent in PurePosixPath(name).parents[:-1]:
            with suppress(OSError):
                (objects / parent).rmdir()
    return len(names)


def _places(keys: Sequence[str]) -> list[str]:
    """Return a path for each key, distinct for distinct keys: the key itself, with hashes where it is no path."""
    folders = {key[:at] for key in keys for at, sign in enumerate(key) if sign == "/"}
    places = []
    for key in keys:
        *parents, name = key.split("/")
        place = "/".join([*map(_part, parents), _part(f"{name}/" if key in folders else name)])
        places.append(place if len(os.fsencode(place)) <= PATH_BYTES else _part(f"{key}/"))
    return places


def _part(part: str) -> str:
    """Return a part of a path if it is the name of a file and does not look hashed, or else its hash.

    A hash keeps the beginning and end of the name, which patterns and suffixes match.
    """
    named = part not in ("", ".", "..") and not re.search(r"[/\0]|~[0-9a-f]{32}~", part)
    if named and len(os.fsencode(part)) <= NAME_BYTES:
        return part
    shown = re.sub(r"\0|^\.+$", "", part.rstrip("/").rpartition("/")[2])
    return f"{shown[:24]}~{hashlib.sha256(os.fsencode(part)).hexdigest()[:32]}~{shown[-16:]}"


def _tag(facts: dict[str, Any]) -> str:
    tag = next((str(facts[key]).strip('"') for key in TAGS if facts.get(key)), "")
    return f"{tag} {facts.get('size')}"

"""The files of DReSD stores and their validation before kernels use them.

Opening reads the manifest, the projection and the small tables. What the kernels trust is checked here; positions and
tokens, which are many, are checked in the kernels.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, StoreError, type_name
from draftstore.storage.files import map_or_empty
from draftstore.storage.manifest import Manifest
from draftstore.stores.dresd.kernels.nearest import ALL, PROBING, DenseIndex
from draftstore.stores.dresd.projection import Projection

LAYER = "last"
"""The layer of the states: the last one, after the final norm."""
PROJECTION_FILE = "projection.bin"

FILES: dict[str, Callable[[Manifest], np.dtype[Any]]] = {
    "tokens.bin": lambda manifest: np.dtype(manifest.token_dtype).newbyteorder("<"),
    "vectors.bin": lambda _: np.dtype("<u2"),  # the bits of float16
    "positions.bin": lambda manifest: _position_dtype(manifest),
    "groups.bin": lambda _: np.dtype("<i8"),
    "group_lists.bin": lambda _: np.dtype("<i4"),
    "lists.bin": lambda _: np.dtype("<i8"),
    "centroids.bin": lambda _: np.dtype("<f4"),
}
"""Element type of each file."""


def _position_dtype(manifest: Manifest) -> np.dtype[Any]:
    wide = manifest.files["positions.bin"].size == 8 * manifest.counts["entries"] > 0
    return np.dtype("<u8" if wide else "<u4")


def check_parameters(path: Path, manifest: Manifest) -> None:
    """Raise a StoreError if a parameter that readers of the files need is missing or wrong."""
    for problem in _parameter_problems(manifest):
        raise _damaged(path, problem)


def _parameter_problems(manifest: Manifest) -> Iterator[str]:
    kinds: dict[str, type] = {"dims": int, "hidden_size": int, "layer": str, "projection": str}
    values = manifest.parameters
    for name, kind in kinds.items():
        if not isinstance(values.get(name), kind) or isinstance(values[name], bool):
            yield f"its manifest has {type_name(values.get(name))} as parameter {name!r}"
    if values["dims"] < 1 or values["hidden_size"] < 1:
        yield f"vectors of {values['dims']} numbers from states of {values['hidden_size']}"
    if values["layer"] != LAYER:
        yield f"states of layer {values['layer']!r}, expected {LAYER!r}"
    probing = values.get("probing", PROBING)
    if not isinstance(probing, float) or not 0.0 < probing <= ALL:
        yield f"a probing of {probing!r}, expected a share above 0 and at most 1"
    for name in sorted({*FILES, PROJECTION_FILE} - manifest.files.keys()):
        yield f"its manifest does not list {name}"


def read_projection(path: Path, manifest: Manifest) -> Projection:
    """Read the projection of a store and compare it with the manifest."""
    dims, hidden_size = manifest.parameters["dims"], manifest.parameters["hidden_size"]
    try:
        projection = Projection.from_bytes((path / PROJECTION_FILE).read_bytes(), dims)
    except (OSError, DraftstoreError) as error:
        raise _damaged(path, f"{PROJECTION_FILE}: {error}") from None
    if projection.hidden_size != hidden_size:
        raise _damaged(
            path,
            f"{PROJECTION_FILE} projects states of {projection.hidden_size:,} numbers, expected {hidden_size:,}",
        )
    expected = manifest.parameters["projection"]
    if projection.digest != expected:
        raise StoreError(
            f"{path} was built with the projection {expected[:12]}, found {projection.digest[:12]} in "
            f"{PROJECTION_FILE}: restore the original file, or build the store again"
        )
    return projection


def map_index(path: Path, manifest: Manifest) -> tuple[DenseIndex, NDArray[Any]]:
    """Map a store's index and tokens and check that they are consistent."""
    dims = manifest.parameters["dims"]
    arrays = {name: map_or_empty(path / name, dtype(manifest)) for name, dtype in FILES.items()}
    for name in ("vectors.bin", "centroids.bin"):
        if len(arrays[name]) % dims:
            raise _damaged(path, f"{name} holds {len(arrays[name]):,} numbers, not rows of {dims:,}")
        arrays[name] = arrays[name].reshape(-1, dims)
    index = DenseIndex(
        arrays["vectors.bin"], arrays["positions.bin"], arrays["groups.bin"], arrays["group_lists.bin"],
        arrays["lists.bin"], arrays["centroids.bin"],
    )  # fmt: skip
    for problem in _index_problems(index, manifest):
        raise _damaged(path, problem)
    return index, arrays["tokens.bin"]


def _index_problems(index: DenseIndex, manifest: Manifest) -> Iterator[str]:
    """Yield inconsistencies of the tables; positions are checked in the kernels."""
    entries, lists, vocab_size = len(index.vectors), len(index.centroids), manifest.vocab_size
    sizes = {
        "vectors.bin": (entries, manifest.counts["entries"]),
        "positions.bin": (len(index.positions), entries),
        "groups.bin": (len(index.groups), vocab_size + 1),
        "group_lists.bin": (len(index.group_lists), vocab_size + 1),
        "lists.bin": (len(index.lists), lists + 1),
    }
    for name, (found, expected) in sizes.items():
        if found != expected:
            yield f"{name} holds {found:,} rows, expected {expected:,}"
    for name, table, end in (
        ("groups.bin", index.groups, entries),
        ("group_lists.bin", index.group_lists, lists),
    ):
        if table[0] != 0 or table[-1] != end or np.any(table[1:] < table[:-1]):
            yield f"{name} does not ascend from 0 to {end:,}"
    if np.any(index.lists[1:] < index.lists[:-1]):
        yield "lists.bin does not ascend"
    large = np.flatnonzero(index.group_lists[1:] > index.group_lists[:-1])
    first, last = index.lists[index.group_lists[large]], index.lists[index.group_lists[large + 1] - 1]
    if (
        np.any(first != index.groups[large])
        or np.any(last > index.groups[large + 1])
        or index.lists[-1] > entries
    ):
        yield "lists.bin does not cover the groups that have lists"


def _damaged(path: Path, problem: str) -> StoreError:
    return StoreError(f"{path}: {problem}: the store is damaged, build it again")

"""The proof that removed documents are gone: their shingles, found in stores, all occur in documents that may stay.

A shingle of a removed text may well be in a store: others say "thank you very much", too. So what is found is looked
for in the texts of the wanted documents, and only what none of them has counts. Hashes of 64 bits may agree by chance;
among a billion different shingles, with a million removed ones, about one in 20,000 proofs would find too much.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session, aliased

from draftstore.errors import DraftstoreError
from draftstore.storage.manifest import TokenizerIdentity, load_manifest
from draftstore.stores.rest.store import DOCUMENTS_FILE, read_digests
from draftstore.stores.rest.store import KIND as REST
from draftstore.text.digests import DIGEST_BYTES, digest_keys
from draftstore.text.scanning import documents_of
from draftstore.text.scans import Scan
from draftstore.text.shingles import LENGTHS, Finder, Hashes, Shingles, encode_texts
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import KIND as TOKENS
from draftstore.text.wanted import removed_rows
from schema import collection_models
from schema.builds import CatalogueError
from schema.collecting import removals_of, wanted_of
from schema.held_tokens import CHUNK, Place, held_digests, places_of
from schema.models import Build, Release
from schema.redrawing import differing_hits
from schema.removing import removed_folder

Hits = dict[int, Hashes]
"""Hashes by length, each ascending."""


class Checked(NamedTuple):
    """What was found in one place of a build.

    Attributes:
        build: the build.
        place: file or table.
        tokens: how many tokens were read, or digests.
        shared: shingles of removed documents there that wanted documents have, too.
        found: shingles there that no wanted document has, or digests of removed documents.
        problem: why the place could not be looked at; None: it was.
    """

    build: Build
    place: str
    tokens: int
    shared: int
    found: int
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        checked: one for each place.
        documents: how many removed texts the digests are of.
        shingles: how many hashes of shingles were looked for.
        without: removals without hashes, which are proven by digest alone.
    """

    checked: list[Checked]
    documents: int
    shingles: int
    without: list[int]

    @property
    def holds(self) -> bool:
        """Whether all could be looked at and compared, and nothing was found."""
        return not self.without and all(not row.found and row.problem is None for row in self.checked)


class Builds(NamedTuple):
    """The builds to look at, with the releases that point at each, and how many older ones are left out."""

    builds: list[Build]
    live: dict[int, list[str]]
    left_out: int


def builds_to_prove(session: Session, name: str, releases: Collection[str], *, old: bool = False) -> Builds:
    """Return the live builds of a collection, and all that were made from the same tokens.

    Args:
        session: open session.
        name: name of the collection.
        releases: names of releases; none: those whose build, or which themselves, are named like the collection.
        old: whether to look at finished builds of the same names that are no longer live, too.

    Raises:
        CatalogueError: there are none.
    """
    source = aliased(Build)  # CREST and DReSD stores have names of their own, and lag behind
    query = select(Release).join(Release.build).outerjoin(source, Build.source_id == source.id)
    named = or_(Release.name == name, _is_of(Build, name), _is_of(source, name))
    rows = session.scalars(query.where(Release.name.in_(releases) if releases else named)).all()
    if missing := sorted({*releases} - {row.name for row in rows}):
        raise CatalogueError(f"no release {missing[0]!r}: `draftstore releases list` shows all releases")
    if not rows:
        raise CatalogueError(
            f"no release of {name} is known: name those that are built from it with --release"
        )
    live: dict[int, list[str]] = {}
    for row in rows:
        live.setdefault(row.build_id, []).append(row.name)
    finished = select(Build).where(Build.state == "finished").order_by(Build.id)
    corpora = {row.build.corpus_id for row in rows if row.build.corpus_id is not None}
    family = list(session.scalars(finished.where(or_(Build.corpus_id.in_(corpora), Build.id.in_(live)))))
    names = {build.name for build in family} | {name}
    alike = or_(Build.name.in_(names), Build.parameters["collection"].as_string() == name)
    others = [
        build
        for build in session.scalars(finished.where(alike))
        if build.id not in {known.id for known in family}
    ]
    return Builds(family + others if old else family, live, 0 if old else len(others))


def _is_of(build: type[Build], name: str) -> ColumnElement[bool]:
    """Tell builds that bear the name of a collection, or whose parameters say that they are made from it."""
    return or_(build.name == name, build.parameters["collection"].as_string() == name)


def prove_removed(
    collection: collection_models.Collection,
    scan: Scan,
    tokenizer: TextTokenizer | None,
    builds: Sequence[Build],
    on_place: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Look for removed documents in builds.

    Args:
        collection: the collection.
        scan: a scan of now, with its sources: what the builds should have been made from.
        tokenizer: the collection's; None: only digests are compared.
        builds: where to look.
        on_place: called with every place before it is read.

    Raises:
        CorpusError: the hashes of a removal are damaged, or a file changed since the scan.
    """
    removed = _removed_keys(collection, scan)
    shingles, without = _shingles(collection)
    finder = Finder(shingles)
    found: list[_Found] = []
    hints: list[NDArray[np.uint8]] = []
    for build in builds:
        for place, problem in _places(build, tokenizer, shingles):
            on_place(f"build {build.id}: {place.name}")
            row, hits = Checked(build, place.name, 0, 0, 0, problem), _union([])
            try:
                if problem is None:
                    row, hits = _look(build, place, finder, hints)
            except DraftstoreError as error:
                row = row._replace(problem=str(error))
            found.append(_Found(row, place, hits))
        found += [_Found(row, None, {}) for row in _digests(build, removed)]
    left = _unexplained(_union(each.hits for each in found), collection, scan, tokenizer, hints)
    checked = [_judged(each, left) for each in found]
    return Proof(_redrawn(checked, found, left), len(removed), shingles.size, without)


class _Found(NamedTuple):
    """A place that was read, and the shingles of removed documents there."""

    row: Checked
    place: Place | None
    hits: Hits


def _judged(each: _Found, left: Hits) -> Checked:
    """Return the row of a place, with what wanted documents do not explain."""
    over = sum(len(np.intersect1d(each.hits[length], left[length])) for length in each.hits)
    return each.row._replace(found=each.row.found + over, shared=sum(map(len, each.hits.values())) - over)


def _redrawn(checked: list[Checked], found: Sequence[_Found], left: Hits) -> list[Checked]:
    """Acquit the trees that the REST store of their build gives again, if nothing was found in that one."""
    finder, rows = Finder(Shingles(left)), list(checked)
    clean = {row.build.digest: row.build for row in checked if row.build.kind == REST}
    for row in checked:
        if row.found or row.problem:
            clean.pop(row.build.digest, None)
    for index, (row, each) in enumerate(zip(checked, found, strict=True)):
        plan = (row.build.manifest or {}).get("parameters", {}).get("plan", {})
        source = clean.get(plan.get("source"))
        if row.found and each.place is not None and each.place.entries is not None and source is not None:
            try:
                hits = differing_hits(Path(row.build.path), each.place, Path(source.path), finder)
            except DraftstoreError as error:
                rows[index] = row._replace(problem=str(error))
                continue
            over = sum(len(np.unique(np.concatenate(parts))) for parts in hits.values())
            rows[index] = row._replace(found=over, shared=row.shared + row.found - over)
    return rows


def _removed_keys(collection: collection_models.Collection, scan: Scan) -> NDArray[np.bytes_]:
    """Return the digests of all removed documents, those that rules found since included."""
    removals = removals_of(collection)
    keys = [scan.keys[removed_rows(scan, removals)], *(digest_keys(removal.digests) for removal in removals)]
    return np.unique(np.concatenate(keys))


def _shingles(collection: collection_models.Collection) -> tuple[Shingles, list[int]]:
    """Return the shingles of all removals, and the removals without any."""
    shingles, without = Shingles.of([]), []
    for row in collection.removals:
        path = removed_folder(collection.name) / f"{row.id}.npz"
        if path.exists():
            shingles = shingles.joined(Shingles.load(path))
        elif row.documents:
            without.append(row.id)
    return shingles, without


def _places(
    build: Build, tokenizer: TextTokenizer | None, shingles: Shingles
) -> Iterator[tuple[Place, str | None]]:
    """Yield the places of a build, or one that says why there are none to look at."""
    try:
        manifest = load_manifest(Path(build.path))
        if problem := _incomparable(manifest.tokenizer, tokenizer, shingles):
            yield Place(build.path, lambda: iter(())), problem
        elif shingles.texts:
            yield from ((place, None) for place in places_of(build))
    except DraftstoreError as error:
        yield Place(build.path, lambda: iter(())), str(error)


def _incomparable(
    identity: TokenizerIdentity, tokenizer: TextTokenizer | None, shingles: Shingles
) -> str | None:
    """Return why shingles cannot be compared with a store's tokens; None if they can."""
    if not shingles.texts:
        return None
    if tokenizer is None:
        return "the collection names no tokenizer: only digests are compared"
    if identity.fingerprint != tokenizer.fingerprint:
        return f"its tokenizer {identity.name!r} is not the collection's: only digests are compared"
    return None if shingles.size else "there are no hashes of shingles: only digests are compared"


def _look(build: Build, place: Place, finder: Finder, hints: list[NDArray[np.uint8]]) -> tuple[Checked, Hits]:
    """Read a place, and return what was found there; `hints` gets the digests of documents that hold it.

    Raises:
        StoreError, DatabaseError: it cannot be read.
    """
    path = Path(build.path)
    manifest = load_manifest(path)
    vocab_size = manifest.vocab_size
    digests = read_digests(path, manifest) if place.in_documents else None
    parts: list[Hits] = []
    tokens = documents = 0
    for ids in place.parts():
        hits = list(finder.find(ids, vocab_size))
        parts.append({length: hashes for length, hashes, _ in hits})
        tokens += min(len(ids), CHUNK) if place.in_documents else len(ids)
        if digests is not None:
            ends = np.flatnonzero(ids >= vocab_size)
            at = documents + np.searchsorted(ends, np.concatenate([[0], *(where for *_, where in hits)])[1:])
            hints.append(digests[np.unique(at[at < len(digests)]).astype(np.intp)])
            documents += int(np.searchsorted(ends, CHUNK))
    return Checked(build, place.name, tokens, 0, 0), _union(parts)


def _digests(build: Build, removed: NDArray[np.bytes_]) -> Iterator[Checked]:
    """Yield what the digests of a build's documents say, if it has them."""
    place = "digests" if build.kind == TOKENS else DOCUMENTS_FILE
    try:
        digests = held_digests(Path(build.path))
    except DraftstoreError as error:
        yield Checked(build, place, 0, 0, 0, str(error))
        return
    if digests is not None:
        found = int(np.isin(digest_keys(digests), removed).sum())
        yield Checked(build, place, len(digests), 0, found)


def _union(parts: Iterable[Hits]) -> Hits:
    """Return all hashes of several hits."""
    lists: dict[int, list[Hashes]] = {length: [np.empty(0, np.uint64)] for length in LENGTHS}
    for part in parts:
        for length, hashes in part.items():
            lists[length].append(hashes)
    return {length: np.unique(np.concatenate(some)) for length, some in lists.items()}


def _unexplained(
    hits: Hits,
    collection: collection_models.Collection,
    scan: Scan,
    tokenizer: TextTokenizer | None,
    hints: Sequence[NDArray[np.uint8]],
) -> Hits:
    """Return the hits that no wanted document has. Documents are read until all are explained.

    Those that a store says to hold the hits are read first; their texts decide, not what the store says.
    """
    wanted = wanted_of(collection, scan)
    keys = digest_keys(wanted)
    hinted = np.isin(keys, digest_keys(np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *hints])))
    left, finder = hits, Finder(Shingles(hits))
    for digests in (wanted[hinted], wanted[~hinted]):
        if tokenizer is None or not any(map(len, left.values())) or not len(digests):
            continue
        for ids in _joined(encode_texts(documents_of(scan, digests), tokenizer)):
            for length, hashes, _ in finder.find(ids, 1 << 31):
                left = {**left, length: np.setdiff1d(left[length], hashes, assume_unique=True)}
            if not any(map(len, left.values())):
                break
    return left


def _joined(texts: Iterable[NDArray[np.int32]]) -> Iterator[NDArray[np.uint32]]:
    """Yield the ids of many texts at once, each ended by the largest number."""
    end = np.full(1, np.iinfo(np.uint32).max, np.uint32)
    part: list[NDArray[np.uint32]] = []
    size = 0
    for ids in texts:
        part += [ids.astype(np.uint32), end]
        size += len(ids)
        if size >= CHUNK:
            yield np.concatenate(part)
            part, size = [], 0
    if part:
        yield np.concatenate(part)

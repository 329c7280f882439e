"""The steps of `rebuild`: a scan of a collection's sources, and its REST store, made from the previous one.

Other stores of a collection lag behind: `is_due` tells when they are rebuilt.
"""

import dataclasses
import hashlib
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import BuildRunningError, CorpusError, DraftstoreError, NoTextError, TokenizerError
from draftstore.live import log
from draftstore.live.texts import identified
from draftstore.storage.files import locked_directory, remove
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.storage.progress import tokenizing
from draftstore.stores.rest.store import KIND as REST
from draftstore.stores.rest.store import RestStore, read_digests
from draftstore.stores.rest.updating import Contents, update_rest
from draftstore.text.digests import answer_digest, digest_keys
from draftstore.text.encoding import tokenize_corpus
from draftstore.text.scans import Scan, documents_of
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizing import CorpusOptions, Gathered, made_with
from draftstore.text.tokens import TokenShards, open_shards
from pipelines.corpora import resolve_tokenizer
from pipelines.ledger import Built, Ledger, Request
from pipelines.places import store_path
from pipelines.progress import StepLogs
from pipelines.steps import Tokens, tokenize
from schema.catalogue.builds import list_builds
from schema.catalogue.lineage import store_digests
from schema.collections.collecting import get_collection, open_tokenizer, scan_collection, wanted_of
from schema.collections.live_logs import forget, live_logs
from schema.collections.models import Collection
from schema.collections.removal_files import collection_folder
from schema.db.home import data_home
from schema.models import Release

SHARDS = "shards"
"""Token ids of new documents, in a folder that rebuilds of a collection use one at a time."""


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a collection holds today: all documents, and those to be in its store, under its name."""

    collection: Collection
    scan: Scan
    contents: Contents
    tokenizer: TextTokenizer


@dataclasses.dataclass(frozen=True)
class Change:
    """What changes from the store `base`, if there is one: documents added, kept and removed."""

    base: Path | None
    added: NDArray[np.uint8]  # [n, 16], their digests
    kept: int
    removed: int

    def counts(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        base = None if self.base is None else str(self.base)
        return {"base": base, "added": len(self.added), "kept": self.kept, "removed": self.removed}

    def __str__(self) -> str:
        return f"{len(self.added):,} documents added, {self.removed:,} removed, {self.kept:,} kept"


class LaggingStore(NamedTuple):
    """A store of a collection that is rebuilt when enough has changed."""

    release: str
    kind: str
    parameters: dict[str, Any]  # with other values, it is due immediately
    after: float  # minimum share of new documents for it to be due


def survey(ledger: Ledger, name: str, segment_tokens: int, model: str | None = None) -> Survey:
    """Scan a collection's sources for stores of its documents and, if a model is named, of its states over them."""
    with ledger.session() as session:
        collection = get_collection(session, name)
        session.expunge_all()
    named = open_tokenizer(collection)
    tokenizer = named or resolve_tokenizer(None, data_home())
    own = None if model is None else load_tokenizer(model)
    if own and (own.fingerprint, own.bos_ids) != (tokenizer.fingerprint, tokenizer.bos_ids):
        raise TokenizerError(
            f"the collection {name} has the tokenizer {tokenizer.name!r}, which is not that of the model {model}: "
            f"`draftstore corpus add {name} --tokenizer {model}` changes it"
        )
    scan = scan_collection(collection, named)  # without a tokenizer, only texts can be read
    scan.require_documents(name)
    digests = wanted_of(collection, scan)
    ledger.logger.info(
        "collection %s: %s files, %s of them read, %s documents wanted",
        name, f"{len(scan.files):,}", f"{scan.read:,}", f"{len(digests):,}",
    )  # fmt: skip
    if not len(digests):
        raise CorpusError(f"the collection {name} has no documents: `draftstore corpus show {name}`")
    keys, first = np.unique(scan.keys, return_index=True)  # each document once
    facts = {
        "sources": [source.place for source in collection.sources],
        "characters": int(scan.column("characters")[first[np.isin(keys, digest_keys(digests))]].sum()),
        **scan.report.facts(),
    }
    files = tuple(Path(file.path) for file in scan.files)
    return Survey(collection, scan, Contents(name, digests, facts, files, segment_tokens), tokenizer)


def renew_rest(ledger: Ledger, surveyed: Survey, workers: int | None) -> tuple[Built, Change]:
    """Find or make the REST store of what a collection holds today, from the newest previous one."""
    contents, tokenizer = surveyed.contents, surveyed.tokenizer
    path = store_path(data_home(), REST, contents.name, plan=contents.plan(tokenizer))
    change = Change(None, contents.digests, 0, 0)
    if base := _newest(ledger, surveyed, path):
        change = _since(base.path, read_digests(base.path), contents.digests)
    folder = collection_folder(contents.name) / "tokens"

    def make(_build_id: int, logs: StepLogs) -> None:
        with locked_directory(folder):
            added = _tokenize(surveyed, change.added, folder / SHARDS, tokenizing(logs.step))
            update_rest(
                contents, tokenizer, path,
                base=change.base, added=added, workers=workers, progress=logs.step,
            )  # fmt: skip

    parameters = {"collection": contents.name, "segment_tokens": contents.segment_tokens, **change.counts()}
    built = ledger.build(Request(REST, contents.name, path, parameters), make)
    # This also removes what a killed run left of other documents.
    with suppress(BuildRunningError), locked_directory(folder):
        remove(folder / SHARDS)
    return built, change


def _since(base: Path, held: NDArray[np.uint8], digests: NDArray[np.uint8]) -> Change:
    """Compare distinct digests, uint8 [n, 16], with those of the documents that a store holds."""
    wanted, known = digest_keys(digests), np.unique(digest_keys(held))
    stays = np.isin(wanted, known)
    kept = int(stays.sum())
    return Change(base, digests[~stays], kept, len(known) - kept)


def _newest(ledger: Ledger, surveyed: Survey, path: Path) -> RestStore | None:
    """Return the newest intact store of a collection with its tokenizer and template, preferably that at `path`."""
    # Every byte of another one is read: damage in it would be copied into all later ones and pass verification there.
    wanted = made_with(surveyed.tokenizer).items()
    with ledger.session() as session:
        builds = list_builds(session, kind=REST, name=surveyed.contents.name, state="finished")
        places = [path, *(Path(build.path) for build in builds)]
    for place in places:
        try:
            manifest = load_manifest(place, REST)
            made = manifest.parameters["plan"]
            if wanted <= made.items():
                store = RestStore.open(place)
                problems = [] if place == path else verify_files(place, manifest)
                if not problems:
                    return store
                ledger.logger.warning("%s: the next store is not made from this one", problems[0])
        except (DraftstoreError, KeyError, OSError):
            continue
    return None


def put_to_rest(ledger: Ledger, surveyed: Survey) -> dict[str, int]:
    """Clear removed documents from live logs and those of the live build from memory; delete unwanted segments.

    Returns:
        How many segments were put to `rest` and how many were `deleted`.
    """
    collection, tokenizer = surveyed.collection, surveyed.tokenizer
    forget(collection, surveyed.scan)
    with ledger.session() as session:
        release = session.get(Release, collection.name)
        held = None if release is None else store_digests(Path(release.build.path))
    published = set() if held is None else set(map(bytes, held))
    unwanted = set(map(bytes, surveyed.scan.digests)) - set(map(bytes, surveyed.contents.digests))
    unwanted.add(answer_digest(""))

    def is_in(digests: set[bytes], document: log.Document) -> bool:
        return identified(document, tokenizer).digest in digests

    counts = {"rest": 0, "deleted": 0}
    for folder in live_logs(collection):
        counts["rest"] += log.put_to_rest(folder, partial(is_in, published | unwanted))
        counts["deleted"] += log.drop_rested(folder, partial(is_in, unwanted))
    return counts


def is_due(ledger: Ledger, surveyed: Survey, store: LaggingStore) -> bool:
    """Return True if a store must be rebuilt: it is made otherwise, or documents were removed or enough added since.

    The live one counts, because a run may have been killed before publishing its own, or a check may have refused that.
    Its documents are those of the build that it was made from.
    """
    with ledger.session() as session:
        release = session.get(Release, store.release)
        if release is None or (last := release.build).source is None:
            return True
        if any(last.parameters.get(key) != value for key, value in store.parameters.items()):
            return True
        path, source = Path(last.path), Path(last.source.path)
    try:
        load_manifest(path, store.kind)
        made, held = load_manifest(source).parameters["plan"], store_digests(source)
    except (DraftstoreError, KeyError):
        return True
    if held is None or not made_with(surveyed.tokenizer).items() <= made.items():
        return True
    change = _since(source, held, surveyed.contents.digests)
    return change.removed > 0 or len(change.added) >= max(store.after * (change.kept + change.removed), 1)


def gather_tokens(ledger: Ledger, surveyed: Survey) -> Tokens:
    """Find or make the token shards of all documents of a collection, in the order of its sources."""
    scan, contents = surveyed.scan, surveyed.contents
    gathered = Gathered(
        partial(documents_of, scan, contents.digests),
        _fingerprint(scan, contents.digests),
        contents.sources,
        contents.corpus,
    )
    options = CorpusOptions(
        corpus=(), name=contents.name, fingerprint=contents.fingerprint, gathered=gathered
    )
    return tokenize(ledger, options, surveyed.tokenizer, {"collection": contents.name})


def _tokenize(
    surveyed: Survey, digests: NDArray[np.uint8], folder: Path, on_progress: Any
) -> TokenShards | None:
    """Write some documents of a collection as token shards."""
    if not len(digests):
        return None
    try:
        return tokenize_corpus(
            documents_of(surveyed.scan, digests),
            surveyed.tokenizer,
            folder,
            corpus_fingerprint=_fingerprint(surveyed.scan, digests)
            + json.dumps(made_with(surveyed.tokenizer)),
            source=f"the collection {surveyed.contents.name}",
            on_progress=on_progress,
        )
    except NoTextError:  # some tokenizers give no tokens for some texts, which are then new in every rebuild
        return open_shards(folder)


def _fingerprint(scan: Scan, digests: NDArray[np.uint8]) -> str:
    """Return the identity of some documents of a scan, their order and ids, by which an interrupted call resumes."""
    files = repr([(file.name, file.identity) for file in scan.files])
    return hashlib.sha256(digests.tobytes() + files.encode("utf-8", "surrogateescape")).hexdigest()

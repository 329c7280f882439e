"""What a collection holds today: a scan of its sources, and the token ids of its documents."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftstore.cluster import address_of
from draftstore.errors import CorpusError, NoTextError, TokenizerError
from draftstore.storage.report import OnProgress, ReadReport
from draftstore.stores.rest.updating import Contents
from draftstore.text.digests import digest_keys
from draftstore.text.scans import Scan, groups_of
from draftstore.text.sharding import tokenize_groups
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizing import BuildTexts, made_with
from draftstore.text.tokens import TokenShards, open_shards
from schema.collections.collecting import (
    get_collection,
    list_collections,
    open_tokenizer,
    scan_collection,
    wanted_of,
)
from schema.collections.models import Collection
from schema.db.embedded import data_home
from schema.renewal.ledger import Ledger
from schema.renewal.making import Tokens, make_tokens, resolve_tokenizer


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a collection holds today: all documents, and those to be in its store, under its name."""

    collection: Collection
    scan: Scan
    contents: Contents
    tokenizer: TextTokenizer

    def order_of(self, digests: NDArray[np.uint8]) -> str:
        """Return the identity of some documents, their order and ids, by which an interrupted call resumes."""
        files = repr([(file.name, file.identity) for file in self.scan.files])
        return hashlib.sha256(digests.tobytes() + files.encode("utf-8", "surrogateescape")).hexdigest()


def collection_names(ledger: Ledger) -> list[str]:
    """Return the names of all collections."""
    with ledger.session() as session:
        return [collection.name for collection in list_collections(session)]


def survey(ledger: Ledger, name: str, segment_tokens: int, model: str | None = None) -> Survey:
    """Scan a collection's sources, for stores of its documents and, if a model is named, of its states over them."""
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


def tokenize_some(
    surveyed: Survey, digests: NDArray[np.uint8], folder: Path, on_progress: OnProgress
) -> TokenShards | None:
    """Write documents, uint8 [n, 16], as token shards to a folder, or resume; None if there are none."""
    if not len(digests):
        return None
    try:
        return tokenize_groups(
            groups_of(surveyed.scan, digests),
            surveyed.tokenizer,
            folder,
            report=ReadReport(),
            cluster=address_of(),
            files=lambda: surveyed.contents.sources,
            corpus_fingerprint=surveyed.order_of(digests) + json.dumps(made_with(surveyed.tokenizer)),
            source=f"the collection {surveyed.contents.name}",
            on_progress=on_progress,
        )
    except NoTextError:  # some tokenizers give no tokens for some texts, which are then new in every rebuild
        return open_shards(folder)


def tokenize_all(ledger: Ledger, surveyed: Survey) -> Tokens:
    """Find or make the token shards of all documents of a collection, in the order of its sources."""
    contents = surveyed.contents
    texts = BuildTexts(
        contents.fingerprint,
        lambda _report: groups_of(surveyed.scan, contents.digests),
        contents.name,
        lambda: contents.sources,
        contents.corpus,
        surveyed.order_of(contents.digests),
    )
    return make_tokens(ledger, contents.name, texts, surveyed.tokenizer, {"collection": contents.name})

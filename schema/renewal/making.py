"""Finding or making one store and registering it.

Each content has its directory, never that of a live store:

    DRAFTSTORE_HOME/stores/NAME/KIND-FINGERPRINT  a store; the fingerprint is of its inputs and parameters

So the same request finds what an earlier run finished, or resumes it; another corpus, option or version of draftstore
gets its own directory beside the old one, which `draftstore catalogue prune` removes once it is no longer needed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import draftstore
from draftstore.hf.building import materials
from draftstore.hf.loading import weights_fingerprint
from draftstore.options import Options
from draftstore.storage.manifest import FORMAT_VERSION, load_manifest, manifest_digest, model_name
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.crest.entries import POSTGRES
from draftstore.stores.kind import ModelSources, Workers
from draftstore.stores.registry import builder_of
from draftstore.stores.rest import joining
from draftstore.stores.rest.store import KIND as REST
from draftstore.text.python_source import (
    Source,
    default_folders,
    find_sources,
    quickstart_tokenizer,
    write_corpus,
)
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizing import KIND as TOKENS
from draftstore.text.tokenizing import BuildTexts, CorpusOptions, build_tokens
from schema.db.embedded import data_home
from schema.renewal.ledger import Built, Ledger, Request, StepLogs
from schema.statistics import load_statistics

DIGITS = 16
DEMO = "demo"
"""Name and release of the stores of flows that name no text: of the source of Python's standard library."""
DEMO_FILE = "python-standard-library.jsonl"
EXCLUDED = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages"})
Reader = Workers | ModelSources
"""What reads the texts of a store: a number of processes, or a model."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The token shards of a corpus and their settings, shared by all stores built from them."""

    built: Built
    texts: BuildTexts
    tokenizer: TextTokenizer
    parameters: dict[str, Any]  # for the catalogue


def store_path(home: Path, kind: str, name: str, **made_of: object) -> Path:
    """Return the directory of a store under `home`; `made_of` determines its content, JSON values."""
    ingredients = [kind, FORMAT_VERSION, draftstore.__version__, made_of]
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
    return home / "stores" / name / f"{kind}-{digest[:DIGITS]}"


def make_tokens(
    ledger: Ledger, name: str, texts: BuildTexts, tokenizer: TextTokenizer, parameters: dict[str, Any]
) -> Tokens:
    """Find or make the token shards of some texts under a name."""
    path = store_path(data_home(), TOKENS, name, **texts.plan(tokenizer))

    def make(_build_id: int, logs: StepLogs) -> None:
        build_tokens(texts, name, tokenizer, path, on_progress=logs.step("tokenizing", "tokens"))

    built = ledger.build(Request(TOKENS, name, path, parameters), make)
    return Tokens(built, texts._replace(shards=built.path), tokenizer, parameters)


def make_store(ledger: Ledger, kind: str, options: Any, by: Reader, source: Tokens | Built) -> Built:
    """Find or build a store of a kind from the token shards of a corpus, or from a REST store.

    `source` determines the texts, not `options`; `by` is the number of processes or the model that reads them.
    """
    builder = builder_of(kind)
    assert builder is not None
    own = parameters_of(options, by)
    if isinstance(source, Tokens):
        made_of, parameters = source.texts.plan(source.tokenizer), source.parameters | own
    else:
        made_of, parameters = {"source": manifest_digest(source.path)}, own
    path = store_path(data_home(), kind, options.name, **made_of, **own)
    backends = tuple(own.get("backends", ()))

    def make(build_id: int, logs: StepLogs) -> None:
        if isinstance(source, Tokens):
            made = materials(by, tokenizer=source.tokenizer, texts=source.texts)
        else:
            made = materials(by, rest=source.path)
        builder.build(options, out=path, progress=logs.step, **made)
        if POSTGRES not in backends:  # with it, the build has loaded them
            load_statistics(build_id, path, progress=logs.step("loading", "n-grams"))

    built = source.built if isinstance(source, Tokens) else source
    return ledger.build(Request(kind, options.name, path, parameters, built.build_id, backends), make)


def parameters_of(options: Options, by: Reader) -> dict[str, Any]:
    """Return what determines a store besides its texts and name, as JSON values: its options and the model."""
    own = options.plan(*CorpusOptions.model_fields)
    if isinstance(by, ModelSources):
        weights = weights_fingerprint(by.model)
        own |= {"model": model_name(by.model), "weights": weights, "model_dtype": by.model_dtype}
    return own


def use_rest(ledger: Ledger, path: Path) -> Built:
    """Register a finished REST store, unless it is registered."""
    path = path.resolve()
    manifest = load_manifest(path, REST)
    request = Request(REST, manifest.name, path, manifest.parameters)
    return ledger.build(request, lambda _build_id, _logs: None)


def join_rest(ledger: Ledger, name: str, sources: Sequence[Built]) -> Built:
    """Find or make the REST store with the segments of several."""
    stores = [source.path for source in sources]
    path = store_path(data_home(), REST, name, joined=[manifest_digest(store) for store in stores])

    def make(_build_id: int, logs: StepLogs) -> None:
        joining.join_rest(stores, path, name=name, progress=logs.step)

    return ledger.build(Request(REST, name, path, {}), make)


def make_counts(ledger: Ledger, name: str, rest: Built, max_n: int, head: int) -> Built:
    """Find or make the n-gram counts of a REST store, in files and in the database."""
    source = manifest_digest(rest.path)
    path = store_path(data_home(), NGRAMS, name, source=source, max_n=max_n, head=head)

    def make(build_id: int, logs: StepLogs) -> None:
        build_counts(rest.path, path, CountOptions(max_n=max_n), name=name, progress=logs.step)
        load_statistics(build_id, path, head=head, progress=logs.step("loading", "n-grams"))

    request = Request(NGRAMS, name, path, {"max_n": max_n, "head": head}, rest.build_id)
    return ledger.build(request, make)


def write_demonstration(home: Path) -> Path:
    """Return the corpus, a file under `home`; written again only if it changed, so that a killed build can resume."""
    path = _demo_folder(home) / DEMO_FILE
    write_corpus(path, _library_sources())
    return path


def resolve_tokenizer(tokenizer: str | None, home: Path) -> TextTokenizer:
    """Load the named tokenizer, else the quickstart's: from an installed package, or trained under `home`."""
    return (
        load_tokenizer(tokenizer)
        if tokenizer
        else quickstart_tokenizer(_demo_folder(home), _library_sources())[0]
    )


def is_demonstration(sources: Sequence[str]) -> bool:
    """Return True if the only source is the demonstration corpus, in any data folder."""
    return {Path(source).name for source in sources} == {DEMO_FILE}


def _demo_folder(home: Path) -> Path:
    folder = home / "corpora"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _library_sources() -> list[Source]:
    sources = find_sources(default_folders()[:1])
    return [source for source in sources if not EXCLUDED & set(PurePosixPath(source.name).parts)]

"""Token shards as a store: the shards of a corpus, its tokenizer and a manifest, published by one rename."""

import hashlib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from draftstore.build import Progress
from draftstore.corpus import ReadReport, read_corpus
from draftstore.encoding import tokenize_corpus
from draftstore.errors import NoTextError, StoreError
from draftstore.files import locked_directory, publish_directory
from draftstore.manifest import MANIFEST_NAME, FileEntry, Manifest, load_manifest, save_manifest
from draftstore.rest import TOKENIZER_FOLDER
from draftstore.tokenizer import TextTokenizer
from draftstore.tokens import TokenShards
from pipelines.corpora import inputs_of
from pipelines.parameters import Corpus

KIND = "tokens"


def build_tokens(
    corpus: Corpus, tokenizer: TextTokenizer, out: Path, *, name: str, progress: Progress
) -> Manifest:
    """Tokenize a corpus, or go on where an interrupted call was; finished shards of the same are left alone.

    Args:
        corpus: names its files.
        tokenizer: makes the ids.
        out: directory of the shards; one for each corpus, tokenizer and way of reading (`places.store_path`).
        name: for people.
        progress: told how far it is.

    Raises:
        CorpusError: the corpus cannot be read, or holds no text.
        BuildError: another process is at work there.
    """
    with suppress(StoreError):
        return load_manifest(out, KIND)
    partial = out.with_name(f".{out.name}.partial")
    with locked_directory(partial):
        report = ReadReport()
        documents = read_corpus(
            corpus.paths,
            render=lambda messages: tokenizer.render_chat(messages, add_generation_prompt=False),
            report=report,
            column=corpus.column,
            glob=corpus.patterns,
            strict=corpus.strict,
        )
        try:
            shards = tokenize_corpus(
                documents,
                tokenizer,
                partial,
                corpus_fingerprint=f"{inputs_of(corpus)} {tokenizer.template_fingerprint}",
                source=", ".join(map(str, corpus.paths)),
                on_progress=progress.tokenized,
            )
        except NoTextError as error:
            reasons = report.absence()
            raise NoTextError(f"{error}: {reasons}" if reasons else str(error)) from None
        if not (
            partial / MANIFEST_NAME
        ).exists():  # else it knows what reading met, and this call read nothing
            (partial / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            tokenizer.save(partial / TOKENIZER_FOLDER)
            save_manifest(partial, _describe(partial, shards, tokenizer, corpus, name, report))
        publish_directory(partial, out)
    return load_manifest(out, KIND)


def _describe(
    folder: Path,
    shards: TokenShards,
    tokenizer: TextTokenizer,
    corpus: Corpus,
    name: str,
    report: ReadReport,
) -> Manifest:
    """Return the manifest of finished shards; the corpus has the fingerprint that a REST store of it has."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    content = [entry.sha256 for shard in shards.shards for _, entry in sorted(shard.files.items())]
    return Manifest(
        kind=KIND,
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        vocab_size=shards.vocab_size,
        token_dtype=shards.dtype.name,
        tokenizer=tokenizer.identity,
        parameters={"column": corpus.column, "glob": list(corpus.patterns), "strict": corpus.strict},
        corpus={
            "fingerprint": hashlib.sha256("".join(content).encode()).hexdigest(),
            "sources": [str(path) for path in corpus.paths],
            "characters": shards.character_count,
            "bad_records": report.bad_records,
            "empty_documents": report.empty_documents,
        },
        counts={
            "documents": shards.document_count,
            "tokens": shards.token_count,
            "entries": len(shards.shards),
        },
        files={path.relative_to(folder).as_posix(): FileEntry.of(path) for path in paths},
    )

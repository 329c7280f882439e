"""Building a REST store from text: tokenize, lay out segments, sort each.

A killed build resumes after its last token shard (draftstore.text.tokenizing). The arrays are byte-identical for the
same input, whatever the number of processes and interruptions.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from draftstore.errors import BuildError
from draftstore.mapping import Pool
from draftstore.search.sorting import MAX_SEGMENT_TOKENS
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import STORE, BuildResult, build_store
from draftstore.stores.rest.segments import cut_segments, lay_out, read_segments, sort_segments
from draftstore.stores.rest.store import KIND
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CorpusOptions, corpus_plan, finish_store, tokenize_into

SEGMENT_TOKENS = 1 << 28
"""Default tokens of a segment: sorting takes nine bytes of memory per token, 2.4 GB."""


@dataclasses.dataclass
class Progress:
    """Progress callbacks of a build, each called repeatedly with the totals so far that its default names."""

    tokenized: Callable[[int, int, int], None] = lambda _documents, _tokens, _characters: None
    sorted: Callable[[int, int], None] = lambda _tokens, _all: None
    hashed: Callable[[int, int], None] = lambda _bytes, _all: None


@dataclasses.dataclass(frozen=True)
class RestOptions(CorpusOptions):
    """Options and corpus of a REST build.

    Attributes:
        segment_tokens: maximum tokens of a segment.
    """

    segment_tokens: int = SEGMENT_TOKENS


def build_rest(
    options: RestOptions,
    tokenizer: TextTokenizer,
    out: Path,
    *,
    tokens: Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    pool: Pool | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Build a REST store, or resume an interrupted build of it.

    Args:
        options: what to build.
        tokenizer: its tokenizer; a copy goes into the store.
        out: directory of the store; its parent is created if missing.
        tokens: existing token shards of the corpus (`tokenizing.build_tokens`), to skip tokenizing.
        overwrite: whether to replace an existing store, even one of the same build.
        workers: processes that sort segments; default: all cores.
        pool: processes that tokenize and sort instead, such as those of `draftstore.cluster`.
        progress: progress callbacks.

    Raises:
        BuildError: `out` is something else, another build is running there, no space, or a worker died.
        CorpusError: the corpus cannot be read or has no text.
    """
    if not 2 <= options.segment_tokens <= MAX_SEGMENT_TOKENS:
        raise BuildError(
            f"segments of {options.segment_tokens:,} tokens: expected 2 to {MAX_SEGMENT_TOKENS:,}"
        )
    plan = {"kind": KIND, **corpus_plan(options, tokenizer), "segment_tokens": options.segment_tokens}
    callbacks = progress or Progress()

    def fill(partial: Path) -> ReadReport:
        texts = tokenize_into(
            partial, options, tokenizer, plan, taken=tokens, pool=pool, on_progress=callbacks.tokenized
        )
        store, vocab_size = partial / STORE, texts.shards.vocab_size
        size = texts.shards.token_count + texts.shards.document_count
        lay_out(store, cut_segments(texts.shards, options.segment_tokens), vocab_size, size)
        segments = read_segments(store)
        threads = workers or os.cpu_count() or 1
        sort_segments(store, range(len(segments)), vocab_size, threads, callbacks.sorted, pool)
        counts = {"entries": int(segments[:, 1].sum()), "segments": len(segments)}
        finish_store(
            store, texts, plan, {"segment_tokens": options.segment_tokens}, counts, on_bytes=callbacks.hashed
        )
        return texts.report

    return build_store(out, plan, options.name, overwrite, fill, sources=options.files)

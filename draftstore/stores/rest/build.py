"""Building a REST store from text: tokenize, lay out segments, sort each.

A killed build resumes after its last token shard (draftstore.text.tokenizing). The arrays are byte-identical for the
same input, regardless of the number of processes and of interruptions.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from draftstore.cluster import address_of
from draftstore.options import EXPERT, Options, Shown
from draftstore.search.sorting import MAX_SEGMENT_TOKENS
from draftstore.storage.report import Progress, ReadReport, silent
from draftstore.storage.staging import STORE, BuildResult, build_store
from draftstore.stores.kind import TOKENIZER, TOKENIZERS, Builder, Spreading, TextSources
from draftstore.stores.rest.segments import cut_segments, lay_out, read_segments, sort_segments
from draftstore.stores.rest.store import KIND
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CORPUS, BuildTexts, CorpusOptions, TextBuild

SEGMENT_TOKENS = 1 << 28
"""Default tokens of a segment: sorting takes nine bytes of memory per token, 2.4 GB."""


class Segments(Options):
    """How tokens are cut into suffix arrays."""

    segment_tokens: Annotated[int, EXPERT] = Field(
        SEGMENT_TOKENS,
        ge=2,
        le=MAX_SEGMENT_TOKENS,
        description="Maximum number of tokens in a suffix array; sorting takes nine bytes of memory for each.",
        examples=[SEGMENT_TOKENS],
    )


class RestOptions(CorpusOptions, Segments):
    """Options and corpus of a REST build."""


class RestSources(RestOptions, Spreading):
    """Sources of a store built from a REST store, from several joined ones, or from texts, which become one first."""

    rest: Annotated[tuple[Path, ...], Shown(metavar="STORE...")] = Field(
        (),
        description="REST store to build the new store from; may be repeated: several are first joined into one.",
        examples=[["/data/stores/chat"]],
    )
    corpus: Annotated[tuple[Path, ...], Shown(metavar="PATH...")] = Field(
        (), description=f"Build the REST store from these texts first, instead of giving one. {CORPUS}"
    )
    tokenizer: Annotated[str | None, Shown(metavar="T")] = Field(
        None, min_length=1, description=f"Needed with a corpus. {TOKENIZER}", examples=TOKENIZERS
    )
    name: Annotated[str, Shown(hidden=True)] = ""


def build_rest(
    options: RestOptions,
    tokenizer: TextTokenizer,
    out: Path,
    *,
    texts: BuildTexts | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    cluster: str | None = None,
    progress: Progress = silent,
) -> BuildResult:
    """Build a REST store at `out`, or resume an interrupted build of it.

    `texts` is the corpus, by default that of the options. `workers` processes sort segments, by default one per core,
    or the nodes of a `cluster`, which also tokenize; by default that of $DRAFTSTORE_CLUSTER. Raises BuildError (see
    `build_store`; no space; a worker died; the cluster cannot be used) or CorpusError.
    """
    parameters = {"segment_tokens": options.segment_tokens}
    texts = texts or options.texts()
    plan, on_tokens = {"kind": KIND, **parameters}, progress("tokenizing", "tokens")
    build = TextBuild(texts, options.name, tokenizer, plan, cluster=cluster, on_progress=on_tokens)

    def fill(partial: Path) -> ReadReport:
        shards, store = build.fill(partial), partial / STORE
        size, vocab_size = shards.token_count + shards.document_count, shards.vocab_size
        lay_out(store, cut_segments(shards, options.segment_tokens), vocab_size, size)
        segments = read_segments(store)
        threads = workers or os.cpu_count() or 1
        pending, on_sorted = range(len(segments)), progress("sorting", "tokens")
        sort_segments(store, pending, vocab_size, threads, on_sorted, address_of(cluster))
        counts = {"entries": int(segments[:, 1].sum()), "segments": len(segments)}
        build.seal(store, parameters, counts, on_bytes=progress("hashing", "bytes"))
        return build.report

    return build_store(out, build.plan, options.name, overwrite, fill, sources=texts.files)


HELP = """Build a REST store: the corpus as token ids with suffix arrays.

Run the same command again to resume a killed build.

\b
Examples:
  draftstore build rest --corpus chats.jsonl.zst src/ --tokenizer ./llama2 --out stores/chat
"""
BUILDER = Builder(RestOptions, TextSources, build_rest, HELP)

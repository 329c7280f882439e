"""The Prefect flows: parameters in, a few tasks, a summary out.

Every flow may be killed at any moment and run again with the same parameters: it resumes. A release moves last, in one
transaction, to a verified store.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from draftstore.answers.responses import BATCH
from draftstore.stores.crest.build import CrestOptions
from draftstore.stores.crest.counts import DEFAULT_MAX_N
from draftstore.stores.dresd.build import DIMS, MAX_LENGTH, SAMPLE, DresdOptions
from draftstore.stores.rest.build import SEGMENT_TOKENS
from pipelines import tasks
from pipelines.corpora import resolve_name
from pipelines.ledger import Ledger
from pipelines.parameters import (
    DEFAULT_CORPUS,
    Backends,
    Batch,
    BatchTokens,
    Cluster,
    Corpus,
    Device,
    Dims,
    Force,
    HeadRows,
    Keep,
    Longest,
    MaxBytes,
    ModelSource,
    Name,
    Ngrams,
    Questions,
    ReleaseName,
    Rule,
    Sample,
    SegmentTokens,
    TokenizerSource,
    Vectors,
    Weights,
    Window,
    Workers,
)
from pipelines.releasing import require_free
from pipelines.reports import Built
from pipelines.steps import Target
from schema.statistics import HEAD


@flow(name="tokenize-corpus")
def tokenize_corpus(
    name: Name | None = None,
    corpus: Corpus = DEFAULT_CORPUS,
    tokenizer: TokenizerSource | None = None,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Write a corpus as token shards.

    Args:
        name: Name of the shards, and the folder they lie in. None: demo, if no corpus is named.
        corpus: The texts, and how they are read. None named: the source of Python's standard library.
        tokenizer: A folder with tokenizer.json, that file, or a name on the Hugging Face hub. None: an installed one.
        cluster: Dask scheduler, as tcp://machine:8786, or local:2 for two processes here. None: this machine.
    """
    name = resolve_name(name, demo=not corpus.paths)
    with Ledger(get_run_logger()) as ledger:
        tokens = tasks.make_tokens(ledger, name, corpus, tokenizer, cluster)
        return _finish(ledger, name, [tokens.built])


@flow(name="build-rest")
def build_rest(
    name: Name | None = None,
    corpus: Corpus = DEFAULT_CORPUS,
    tokenizer: TokenizerSource | None = None,
    segment_tokens: SegmentTokens = SEGMENT_TOKENS,
    workers: Workers | None = None,
    cluster: Cluster | None = None,
    release: ReleaseName | None = None,
    force: Force = [],  # noqa: B006 - never changed; the page shows it
    keep: Keep | None = None,
) -> dict[str, Any]:
    """Build a REST store: a corpus as token ids with suffix arrays.

    Args:
        name: Name of the store, and the folder it lies in. None: demo, if no corpus is named.
        corpus: The texts, and how they are read. None named: the source of Python's standard library.
        tokenizer: A folder with tokenizer.json, that file, or a name on the Hugging Face hub. None: an installed one.
        segment_tokens: Most tokens of one suffix array; sorting takes nine bytes of memory for each.
        workers: Most processes that sort. None: one for each core.
        cluster: Dask scheduler, as tcp://machine:8786, or local:2 for two processes here. None: this machine.
        release: The release that shall point at the store once it verifies; {name} stands for the name. None: none.
        force: Checks to override where the store is too different from the live one.
        keep: How many builds of each kind and name stay; older ones go unless something needs them. None: all.
    """
    with Ledger(get_run_logger()) as ledger:
        name, release = _names(ledger, name, release, demo=not corpus.paths)
        builds = _rest(ledger, name, corpus, tokenizer, segment_tokens, workers, cluster)
        return _finish(ledger, name, builds, release, force, keep)


@flow(name="count-ngrams")
def count_ngrams(
    name: Name | None = None,
    corpus: Corpus = DEFAULT_CORPUS,
    tokenizer: TokenizerSource | None = None,
    rest: Path | None = None,
    max_n: Longest = DEFAULT_MAX_N,
    head: HeadRows = HEAD,
    segment_tokens: SegmentTokens = SEGMENT_TOKENS,
    workers: Workers | None = None,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Count the n-grams of a REST store exactly, all into Parquet, the most common ones and the spectrum into SQL.

    Args:
        name: Name of the counts, and the folder they lie in. None: demo, if no corpus is named.
        corpus: The texts of the REST store, which is built unless it is there; not read where `rest` names one.
        tokenizer: A folder with tokenizer.json, that file, or a name on the Hugging Face hub. None: an installed one.
        rest: A finished REST store on the worker's machine to count instead.
        max_n: Most tokens of an n-gram.
        head: How many n-grams of each n go into the database with their text, the most common ones.
        segment_tokens: Most tokens of one suffix array of the REST store.
        workers: Most processes that sort. None: one for each core.
        cluster: Dask scheduler, as tcp://machine:8786, or local:2 for two processes here. None: this machine.
    """
    name = resolve_name(name, demo=not corpus.paths and rest is None)
    with Ledger(get_run_logger()) as ledger:
        builds = _rest(ledger, name, corpus, tokenizer, segment_tokens, workers, cluster, rest)
        builds.append(tasks.make_counts(ledger, name, builds[-1], max_n, head, cluster))
        return _finish(ledger, name, builds)


@flow(name="build-crest")
def build_crest(
    name: Name | None = None,
    corpus: Corpus = DEFAULT_CORPUS,
    tokenizer: TokenizerSource | None = None,
    rest: Path | None = None,
    max_n: Longest = DEFAULT_MAX_N,
    selection: Rule = "gain",
    ngrams: Ngrams | None = None,
    max_bytes: MaxBytes | None = None,
    backends: Backends = ["lmdb"],  # noqa: B006 - never changed; the page shows it
    head: HeadRows = HEAD,
    segment_tokens: SegmentTokens = SEGMENT_TOKENS,
    workers: Workers | None = None,
    cluster: Cluster | None = None,
    release: ReleaseName | None = None,
    force: Force = [],  # noqa: B006 - never changed; the page shows it
    keep: Keep | None = None,
) -> dict[str, Any]:
    """Build a CREST store: the draft trees of the most common n-grams, with statistics to ask about in SQL.

    Args:
        name: Name of the store, and the folder it lies in. None: demo, if no corpus is named.
        corpus: The texts; the REST store of them is built unless it is there. Not read where `rest` names one.
        tokenizer: A folder with tokenizer.json, that file, or a name on the Hugging Face hub. None: an installed one.
        rest: A finished REST store on the worker's machine to cut the trees from instead.
        max_n: Most tokens of an n-gram.
        selection: Which n-grams are kept: those that save the most passes (gain), the most common over all n (global),
            equally many of each n (combined), or those of max_n alone (single).
        ngrams: How many n-grams are kept; give this or max_bytes. None of both: 100,000.
        max_bytes: Most bytes of the kept trees on disk.
        backends: Where the trees lie: in a file, in the database, or in both.
        head: How many n-grams of each n go into the database with their text, the most common ones.
        segment_tokens: Most tokens of one suffix array of the REST store.
        workers: Most processes that sort and cut trees. None: one for each core.
        cluster: Dask scheduler, as tcp://machine:8786, or local:2 for two processes here. None: this machine.
        release: The release that shall point at the store once it verifies; {name} stands for the name. None: none.
        force: Checks to override where the store is too different from the live one.
        keep: How many builds of each kind and name stay; older ones go unless something needs them. None: all.
    """
    with Ledger(get_run_logger()) as ledger:
        name, release = _names(ledger, name, release, demo=not corpus.paths and rest is None)
        options = CrestOptions(
            name=name,
            max_n=max_n,
            selection=selection,
            ngrams=ngrams,
            max_bytes=max_bytes,
            backends=tuple(sorted(set(backends))),
        )
        options.check()  # before hours of work
        builds = _rest(ledger, name, corpus, tokenizer, segment_tokens, workers, cluster, rest)
        source = builds[-1]
        builds.append(tasks.make_counts(ledger, name, source, max_n, head, cluster))
        builds.append(tasks.make_crest(ledger, options, source, workers))
        return _finish(ledger, name, builds, release, force, keep)


@flow(name="generate-responses")
def generate_responses(
    model: ModelSource,
    questions: Questions,
    name: Name,
    batch: Batch = BATCH,
    dtype: Weights | None = None,
    device: Device | None = None,
) -> dict[str, Any]:
    """Write down what a model answers, as a corpus for its stores; and take over what it has answered already.

    The files of a name keep their places, so that scheduled builds can name them as their corpus: in the data folder
    `corpora/NAME/answers.jsonl.zst` for prompts, and beside it `logged.jsonl.zst` for logs.

    Args:
        model: A folder, or a name on the Hugging Face hub.
        questions: Prompts and how they are answered, and response logs of workers.
        name: Name of the answers, and the folder they lie in.
        batch: How many answers are decoded at once; halved where memory does not suffice.
        dtype: Type of the model's weights. None: what the files say, on a CPU float32.
        device: Where the model runs. None: the GPU, if there is one.
    """
    answers = tasks.make_answers(get_run_logger(), name, Target(model, dtype, device), questions, batch)
    tasks.report_answers(name, model, answers)
    return {
        "name": name,
        "model": model,
        "paths": [str(made.path) for made in answers],
        "answers": sum(made.counts["answers"] for made in answers),
        "tokens": sum(made.counts["tokens"] for made in answers),
        "reused": all(made.reused for made in answers),
    }


@flow(name="build-dresd")
def build_dresd(
    model: ModelSource,
    name: Name | None = None,
    corpus: Corpus = DEFAULT_CORPUS,
    questions: Questions | None = None,
    batch: Batch = BATCH,
    dims: Dims = DIMS,
    dtype: Vectors = "float16",
    max_length: Window = MAX_LENGTH,
    sample: Sample = SAMPLE,
    batch_tokens: BatchTokens | None = None,
    model_dtype: Weights | None = None,
    device: Device | None = None,
    release: ReleaseName | None = None,
    force: Force = [],  # noqa: B006 - never changed; the page shows it
    keep: Keep | None = None,
) -> dict[str, Any]:
    """Build a DReSD store: the hidden states of a model over a corpus, with what comes next; best over its own answers.

    Args:
        model: A folder with a tokenizer.json, or a name on the Hugging Face hub. The store serves this model alone.
        name: Name of the store, and the folder it lies in. None: demo, if no corpus is named.
        corpus: The texts, and how they are read. None named: the source of Python's standard library.
        questions: Have the model answer these first, and build from its answers, with the files that `corpus` names.
            None: build from the corpus alone.
        batch: How many answers are decoded at once.
        dims: Numbers of a vector, to which hidden states are projected.
        dtype: Type of these numbers: int8 takes half the space.
        max_length: Most tokens that the model reads of a text at once.
        sample: Most hidden states that the projection is fitted to.
        batch_tokens: Most tokens that the model reads in one batch. None: 2,048 on CPUs, 16,384 on GPUs.
        model_dtype: Type of the model's weights. None: what the files say, on a CPU float32.
        device: Where the model runs. None: the GPU, if there is one.
        release: The release that shall point at the store once it verifies; {name} stands for the name. None: none.
        force: Checks to override where the store is too different from the live one.
        keep: How many builds of each kind and name stay; older ones go unless something needs them. None: all.
    """
    target = Target(model, model_dtype, device)
    with Ledger(get_run_logger()) as ledger:
        name, release = _names(ledger, name, release, demo=not corpus.paths and questions is None)
        options = DresdOptions((), name, dims=dims, dtype=dtype, max_length=max_length, sample=sample)
        options.check()  # before hours of work
        if questions is not None:
            answers = tasks.make_answers(ledger.logger, name, target, questions, batch)
            tasks.report_answers(name, model, answers)
            corpus = corpus.model_copy(update={"paths": [*corpus.paths, *(made.path for made in answers)]})
        tokens = tasks.make_tokens(ledger, name, corpus, model)
        builds = [tokens.built, tasks.make_dresd(ledger, options, target, tokens, batch_tokens)]
        return _finish(ledger, name, builds, release, force, keep)


def _names(ledger: Ledger, name: str | None, release: str | None, *, demo: bool) -> tuple[str, str | None]:
    """Return the names of a store and of its release, which the demonstration may not take from others."""
    name = resolve_name(name, demo=demo)
    release = release and release.replace("{name}", name)
    if demo and release:
        require_free(ledger, release)  # before hours of work
    return name, release


def _rest(
    ledger: Ledger,
    name: str,
    corpus: Corpus,
    tokenizer: str | None,
    segment_tokens: int,
    workers: int | None,
    cluster: str | None,
    rest: Path | None = None,
) -> list[Built]:
    """Register the REST store `rest`, or build that of the corpus; return the builds, the store last."""
    if rest is not None:
        return [tasks.use_rest(ledger, rest)]
    tokens = tasks.make_tokens(ledger, name, corpus, tokenizer, cluster)
    return [tokens.built, tasks.make_rest(ledger, tokens, segment_tokens, workers, cluster)]


def _finish(
    ledger: Ledger,
    name: str,
    builds: Sequence[Built],
    release: str | None = None,
    force: Sequence[str] = (),
    keep: int | None = None,
) -> dict[str, Any]:
    """Move the release, if there is one, to the last build; remove all but `keep` old builds; report on the page."""
    notes = [] if release is None else tasks.publish(ledger, release, builds[-1], force)
    if keep is not None:
        notes += tasks.prune(ledger, keep)
    tasks.report(name, builds, release, notes)
    return {"name": name, "release": release, **builds[-1].summary()}

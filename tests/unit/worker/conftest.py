"""Shared parts of the worker's tests: an engine that answers with one text, and a worker around it."""

from collections.abc import Iterator

import pytest

from draftstore.text.tokenizer import TextTokenizer
from tests.fakes.workers import ANSWER, FakeEngine, Worker, running_worker


@pytest.fixture(scope="module")
def engine(small_tokenizer: TextTokenizer) -> FakeEngine:
    return FakeEngine(small_tokenizer, ANSWER, chunk=3)


@pytest.fixture(scope="module")
def worker(engine: FakeEngine) -> Iterator[Worker]:
    with running_worker(engine, max_tokens=256, max_choices=6, body=100_000) as worker:
        yield worker

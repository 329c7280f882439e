"""docs/team/frames.md is correct: its numbers, its bytes, its client, and the rules of a connection."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftstore.remote import wire
from draftstore.stores.registry import open_store
from draftstore.trees.tree import DraftTree
from services.lookup.settings import Limits
from tests import ROOT
from tests.fakes.lookups import Caller, contexts_of, serving
from tests.unit.trees.test_batch import batch_of
from tests.unit.trees.test_tree import ANIMALS

TEXT = (ROOT / "docs" / "team" / "frames.md").read_text(encoding="utf-8")
CLIENT, USE = re.findall(r"^```python\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
REQUEST, ANSWER = map(bytes.fromhex, re.findall(r"^```hex\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL))
CHAT = np.array([[-1, -1, 15, 27], [15, 27, 4, 9]], np.int32)


@pytest.fixture(scope="module")
def stores(small_store: Path, wide_store: Path) -> dict[str, Path]:
    return {"rest": small_store, "wide": wide_store}


@pytest.fixture
def caller(stores: dict[str, Path]) -> Iterator[Caller]:
    with serving(stores, limits=Limits(shared_budget=600)) as lookups, lookups.caller() as caller:
        yield caller


@pytest.fixture(scope="module")
def client() -> dict[str, Any]:
    """Return the names that the client of the page defines."""
    names: dict[str, Any] = {}
    exec(compile(CLIENT, "docs/team/frames.md", "exec"), names)
    return names


def nodes_of(tree: DraftTree) -> list[tuple[int, int, float]]:
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), strict=True))


def test_the_bytes_of_the_example() -> None:
    assert wire.encode_request(1, "chat", CHAT, 8, 1 / 32, "wide") == REQUEST
    batch = batch_of([ANIMALS.prefix(3), DraftTree.empty()], 3)._replace(
        match_lengths=np.array([2, 0], np.int32), match_counts=np.array([31, 0], np.int64)
    )
    assert wire.encode_answer(1, 0x9D3C5A1B7E2F4860, 0x35963F0B5926E1EB, 57, batch) == ANSWER


@pytest.mark.parametrize("name", ["rest", "wide"])
def test_the_client_of_the_page_gets_the_trees_of_the_local_store(
    client: dict[str, Any], stores: dict[str, Path], caller: Caller, name: str
) -> None:
    nodes = 0
    with closing(open_store(stores[name])) as store, caller.socket.makefile("rwb") as stream:
        for number, (batch, budget, least) in enumerate([(1, 8, 0.0), (40, 64, 0.01), (3, 600, 0.0)], 1):
            contexts = contexts_of(stores[name], batch, seed=number)
            rows = [[token for token in row if token >= 0] for row in contexts.tolist()]
            found = client["draft"](stream, number, name, rows, budget, least)
            drafts = store.drafter().draft(contexts, budget, least)
            assert [nodes_of(draft.tree) for draft in drafts] == [
                [(token, parent, float(np.float32(prob))) for token, parent, prob in tree] for tree in found
            ]
            nodes += sum(map(len, found))
        with pytest.raises(RuntimeError, match="status 4: nothing is served under the name 'chat'"):
            client["draft"](stream, 4, "chat", [[1]])
    assert nodes > 100


def test_the_client_is_used_as_the_page_shows(
    client: dict[str, Any], caller: Caller, stores: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    contexts = contexts_of(stores["rest"], 40)
    with closing(open_store(stores["rest"])) as store:
        drafts = store.drafter().draft(contexts)
    known = next(row for row, draft in zip(contexts.tolist(), drafts, strict=True) if len(draft.tree))
    names = {**client, "connection": caller.socket, "TOKEN": "secret", "NAME": "rest"}
    exec(compile(USE.replace("[15, 27, 4]", str(known)), "docs/team/frames.md", "exec"), names)
    names["stream"].close()
    assert capsys.readouterr().out

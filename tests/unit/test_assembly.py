"""From the sources that a user names to one drafter: all are opened, checked, mixed and closed."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.assembly.drafter import Assembly, assemble
from draftstore.assembly.sources import Sources
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, LookupServiceError, StoreError, TokenizerError
from draftstore.recycling.build import RecyclingOptions, build_recycling
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.storage.locks import exclusive
from draftstore.storage.manifest import TOKENIZER_FOLDER, TokenizerIdentity, load_manifest
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.registry import open_store
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import DraftTree
from tests.fakes.dense_stores import make_dense_store
from tests.fakes.lookups import contexts_of, serving
from tests.fakes.waiting import SECONDS

OTHER = TokenizerIdentity("other", "0" * 64)
MODEL = "organisation/model"


def assembled(sources: Sources, tokenizer: TextTokenizer, vocab_size: int | None = None) -> Assembly:
    return assemble(
        sources,
        vocab_size=vocab_size or tokenizer.vocab_size,
        tokenizer=tokenizer.identity,
        model=MODEL,
    )


def draft(assembly: Assembly, context: list[int], budget: int = 32) -> DraftTree:
    return assembly.session(context).propose(budget)


def some_contexts(store: Path) -> list[list[int]]:
    """Return texts from a store, so that it has drafts for them."""
    return [row[row >= 0].tolist() for row in contexts_of(store, 20)]


def test_nothing_named_drafts_nothing(small_tokenizer: TextTokenizer) -> None:
    with assembled(Sources(request=False), small_tokenizer) as assembly:
        assert assembly.parts == ()
        session = assembly.session([1, 2])
        assert len(session.propose(64)) == 0
        session.observe([3], tree=DraftTree.empty())
        assert not session.needs_candidates
        assert not session.needs_hidden


def texts(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return what the nodes of a draft say, each with all before it."""
    return {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


@pytest.fixture
def small_dense(tmp_path: Path, small_store: Path, small_tokenizer: TextTokenizer) -> Path:
    """Write a store of hidden states over some texts."""
    return make_dense_store(
        tmp_path / "dense", some_contexts(small_store), tokenizer=small_tokenizer, target_model=MODEL
    )


@pytest.fixture(params=["small_store", "small_crest", "small_dense"])
def store(request: pytest.FixtureRequest) -> Path:
    """Return a store of each kind."""
    path: Path = request.getfixturevalue(request.param)
    return path


def some_states(path: Path) -> list[tuple[int, NDArray[np.float16]]]:
    """Return tokens that entries begin with, each with a state like that of one."""
    contexts, states = DresdStore.open(path).samples(20)
    assert states is not None
    return list(zip(contexts[:, -1].tolist(), states, strict=True))


def some_prompts(path: Path) -> list[tuple[list[int], dict[str, Any]]]:
    """Return contexts that a store has drafts for, with the states that it needs."""
    if load_manifest(path).kind == "dresd":
        return [([token], {"hidden": state}) for token, state in some_states(path)]
    return [(row[row >= 0].tolist(), {}) for row in contexts_of(path, 20)]


@pytest.mark.parametrize("other", [False, True])
def test_one_store_drafts_as_it_does_alone(store: Path, small_tokenizer: TextTokenizer, other: bool) -> None:
    opened = open_store(store)
    strategy = (
        next((name for name in opened.strategies if name != opened.default_strategy), None) if other else None
    )
    alone, nodes = opened.drafter(strategy or opened.default_strategy), 0
    with assembled(Sources(stores=(store,), strategy=strategy, request=False), small_tokenizer) as assembly:
        assert [(part.kind, part.name) for part in assembly.parts] == [
            (opened.manifest.kind, opened.manifest.name)
        ]
        for context, given in some_prompts(store):
            session = assembly.session([3, *context], **given)
            assert session.needs_hidden == bool(given)
            tree = session.propose(32)
            assert tree == alone.session([3, *context], **given).propose(32)
            nodes += len(tree)
    assert nodes > 0


@pytest.mark.parametrize("more", [-60, 100_000])
def test_a_model_that_knows_other_ids(store: Path, small_tokenizer: TextTokenizer, more: int) -> None:
    """Ids that it does not know are cut out; a model with padded matrices may emit the padding."""
    size = small_tokenizer.vocab_size + more
    alone, nodes, cut = open_store(store).drafter(), 0, 0
    with assembled(Sources(stores=(store,), request=False), small_tokenizer, size) as assembly:
        for context, given in some_prompts(store):
            if max(context) < size:
                session = assembly.session(context, **given)
                tree, whole = session.propose(32), alone.session(context, **given).propose(32)
                tree.validate()
                assert texts(tree) == {text for text in texts(whole) if max(text) < size}
                nodes, cut = nodes + len(tree), cut + len(whole) - len(tree)
                session.observe([size - 1], **given)
                assert more < 0 or len(session.propose(32)) == 0
                session.observe(context, **given)
                assert session.propose(32) == tree
    assert nodes > 0
    assert (cut > 0) == (more < 0)


def test_its_stores_are_in_use_until_it_is_closed(small_store: Path, small_tokenizer: TextTokenizer) -> None:
    for in_use in (True, False):
        with (
            assembled(Sources(stores=(small_store,) * in_use, request=False), small_tokenizer),
            exclusive(small_store) as free,
        ):
            assert free is not in_use
    with pytest.raises(StoreError, match="not a store"):  # what comes after it cannot be opened
        assembled(Sources(stores=(small_store, small_store.parent), request=False), small_tokenizer)
    with exclusive(small_store) as free:
        assert free


def test_several_sources_become_a_mixture(
    small_store: Path, small_crest: Path, small_tokenizer: TextTokenizer
) -> None:
    sources = Sources(stores=(small_store, small_crest), request=True, recycling=True)
    with assembled(sources, small_tokenizer) as assembly:
        assert isinstance(assembly.drafter, Mixture)
        assert {part.kind for part in assembly.parts} == {"request", "rest", "crest", "recycling"}
        session = assembly.session([5, 6, 7, 8, 5, 6, 7])
        assert session.needs_candidates, "recycling is among them"
        tree = session.propose(32)
        tree.validate()
        assert tree.accepted(np.array([8], np.int32)), "the request foretells it"
        kinds = [type(part.drafter) for part in assembly.parts if part.kind in ("request", "recycling")]
        assert kinds == [RequestDrafter, RecyclingDrafter]


def test_hidden_states_of_another_model_are_refused_with_both_names(
    small_dense: Path, small_tokenizer: TextTokenizer
) -> None:
    sources = Sources(stores=(small_dense,), request=False)
    known: dict[str, Any] = {"vocab_size": small_tokenizer.vocab_size, "tokenizer": small_tokenizer.identity}
    with pytest.raises(StoreError, match=f"'{MODEL}', found 'other/model'"):
        assemble(sources, model="other/model", **known)
    with pytest.raises(StoreError, match="states of 16 numbers, the model's have 17"):
        assemble(sources, model=MODEL, hidden_size=17, **known)
    with pytest.raises(TokenizerError, match=r"'small-bpe'.*found 'other'"):
        assemble(sources, model=MODEL, **(known | {"tokenizer": OTHER}))
    with assemble(sources, model=MODEL, hidden_size=16, **known) as assembly:
        assert [part.kind for part in assembly.parts] == ["dresd"]


@pytest.mark.parametrize(
    ("strategy", "follows"),
    [(None, []), ("longest", ["rest"]), ("backoff", ["rest", "crest"]), ("deep", ["dresd"])],
)
def test_a_strategy_is_for_the_stores_that_know_it(
    small_store: Path,
    small_crest: Path,
    small_dense: Path,
    small_tokenizer: TextTokenizer,
    strategy: str | None,
    follows: list[str],
) -> None:
    stores = (small_store, small_crest, small_dense)
    with assembled(Sources(stores=stores, strategy=strategy, request=True), small_tokenizer) as assembly:
        assert [part.kind for part in assembly.parts if part.strategy] == follows
        assert {part.strategy for part in assembly.parts} <= {strategy, None}
        alone = open_store(small_store).drafter("longest" if strategy == "longest" else "backoff")
        part = next(part for part in assembly.parts if part.kind == "rest")
        for context in some_contexts(small_store):
            session = part.drafter.session(context)
            assert session.propose(32) == alone.session(context).propose(32)


def test_a_strategy_that_nothing_follows_is_refused(
    small_store: Path, small_dense: Path, small_tokenizer: TextTokenizer
) -> None:
    with pytest.raises(DraftstoreError, match=r"supports the strategy 'deep' \(small\): omit it"):
        assembled(Sources(stores=(small_store,), strategy="deep", request=False), small_tokenizer)
    with pytest.raises(DraftstoreError, match=r"'longest' \(the request itself, dense\)"):
        assembled(Sources(stores=(small_dense,), strategy="longest", request=True), small_tokenizer)


def test_a_store_that_was_cut_is_left_out(
    small_store: Path, tmp_path: Path, small_tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    contexts = some_contexts(small_store)
    copied = Path(shutil.copytree(small_store, tmp_path / "copied"))
    with (
        assembled(Sources(stores=(copied,), request=False), small_tokenizer) as alone,
        assembled(Sources(stores=(copied,), request=True), small_tokenizer) as mixed,
    ):
        assert any(len(draft(alone, context)) for context in contexts)
        mapped = (name for name in load_manifest(copied).files if not name.startswith(TOKENIZER_FOLDER))
        largest = max(mapped, key=lambda name: (copied / name).stat().st_size)
        os.truncate(copied / largest, 0)
        for context in contexts:
            assert len(draft(alone, context)) == 0
        assert draft(mixed, [5, 6, 5]).tokens[0] == 6
    assert [f"{copied / largest} was truncated" in record.getMessage() for record in caplog.records] == [
        True
    ] * 2


def test_recycled_candidates_are_a_start_for_their_own_model(
    tmp_path: Path, small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    own, other = (
        build_recycling(RecyclingOptions(model_id=f"{name}/model"), small_store, tmp_path / name).path
        for name in ("organisation", "other")
    )
    sources = Sources(stores=(own,), recycling=True, request=False)
    with assembled(sources, small_tokenizer) as assembly:
        assert [part.kind for part in assembly.parts] == ["recycling"], "and no second, cold one"
        drafter = assembly.parts[0].drafter
        assert isinstance(drafter, RecyclingDrafter)
        token = int(np.argmax(np.count_nonzero(drafter.matrix >= 0, axis=1)))
        assert set(drafter.matrix[token].tolist()) <= set(draft(assembly, [token]).tokens.tolist())
    with pytest.raises(StoreError, match="'other/model'"):
        assembled(Sources(stores=(other,), request=False), small_tokenizer)


def test_a_release_of_the_lookup_service_drafts_as_the_store(
    small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    alone = open_store(small_store).drafter()
    with serving({"chat": small_store}) as lookups, lookups.caller() as caller:
        caller.draft(
            "chat", contexts_of(small_store, 1)
        )  # kernels may have to be compiled, clients do not wait
        sources = Sources(lookup=str(lookups.socket), release="chat", deadline=SECONDS, request=False)
        with assembled(sources, small_tokenizer) as assembly:
            assert [(part.kind, part.name) for part in assembly.parts] == [("lookup", "chat")]
            for context in some_contexts(small_store):
                assert draft(assembly, context) == alone.session(context).propose(32)


def test_a_dense_release_drafts_as_the_store_for_its_own_model(
    small_store: Path, small_dense: Path, small_tokenizer: TextTokenizer
) -> None:
    alone = DresdStore.open(small_dense).drafter("deep")
    known: dict[str, Any] = {"vocab_size": small_tokenizer.vocab_size, "tokenizer": small_tokenizer.identity}
    with serving({"dense": small_dense}) as lookups:
        there = Sources(
            lookup=str(lookups.socket), release="dense", strategy="deep", deadline=SECONDS, request=False
        )
        for stores in ((), (small_store,)):
            sources = there.changed(stores=stores)
            with assemble(sources, model=MODEL, hidden_size=16, **known) as assembly:
                assert [part.kind for part in assembly.parts if part.strategy] == ["lookup"]
                part = assembly.parts[-1]
                for token, state in some_states(small_dense):
                    tree = part.drafter.session([token], hidden=state).propose(32)
                    assert tree == alone.session([token], hidden=state).propose(32)
        with pytest.raises(LookupServiceError, match=f"'{MODEL}', expected 'other/model'"):
            assemble(there, model="other/model", **known)
        with pytest.raises(LookupServiceError, match="states of size 16, this model's have size 17"):
            assemble(there, model=MODEL, hidden_size=17, **known)


def test_the_lookup_service_is_checked_at_the_start(
    tmp_path: Path, small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    with serving({"chat": small_store}) as lookups:
        where = str(lookups.socket)
        size = small_tokenizer.vocab_size
        with pytest.raises(LookupServiceError, match="tokenizer"):
            assemble(Sources(lookup=where, release="chat", request=False), vocab_size=size, tokenizer=OTHER)
        with pytest.raises(DraftstoreError, match="name one; it serves chat"):
            assembled(Sources(lookup=where, request=False), small_tokenizer)
    with pytest.raises(LookupServiceError, match="draftstore serve"):
        assembled(Sources(lookup=str(tmp_path / "none.sock"), release="chat", request=False), small_tokenizer)
    with pytest.raises(DraftstoreError, match=r"no release given for .*: name one"):
        assembled(Sources(lookup=str(tmp_path / "none.sock"), request=False), small_tokenizer)

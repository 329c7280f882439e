"""From what a user names to one drafter: everything is opened, checked, mixed and closed."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.assembly import Assembly, Sources, assemble
from draftstore.drafting.drafter import projection_of
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.partitions import PartitionedDrafter
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DraftstoreError, LookupServiceError, StoreError, TokenizerError
from draftstore.storage.lease import exclusive
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.recycling.build import save_recycling
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
    with assembled(Sources(), small_tokenizer) as assembly:
        assert assembly.parts == ()
        session = assembly.session([1, 2])
        assert len(session.propose(64)) == 0
        session.observe([3], tree=DraftTree.empty())
        assert not session.needs_candidates
        assert not session.needs_hidden


@pytest.mark.parametrize("strategy", [None, "longest"])
def test_one_store_drafts_as_it_does_alone(
    small_store: Path, small_crest: Path, small_tokenizer: TextTokenizer, strategy: str | None
) -> None:
    for path in (small_store, small_crest):
        alone = open_store(path).drafter(strategy or "backoff")
        with assembled(Sources(stores=(path,), strategy=strategy), small_tokenizer) as assembly:
            assert [part.kind for part in assembly.parts] == [open_store(path).manifest.kind]
            for context in some_contexts(small_store):
                assert draft(assembly, context) == alone.session(context).propose(32)


def test_its_stores_are_in_use_until_it_is_closed(small_store: Path, small_tokenizer: TextTokenizer) -> None:
    for in_use in (True, False):
        with (
            assembled(Sources(stores=(small_store,) * in_use), small_tokenizer),
            exclusive(small_store) as free,
        ):
            assert free is not in_use


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


def test_a_foreign_tokenizer_is_refused_with_both_names(
    small_store: Path, small_crest: Path, small_tokenizer: TextTokenizer
) -> None:
    for path in (small_store, small_crest):
        with pytest.raises(TokenizerError, match=r"'small-bpe'.*found 'other'"):
            assemble(Sources(stores=(path,)), vocab_size=small_tokenizer.vocab_size, tokenizer=OTHER)


def test_what_is_no_store_is_refused(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    with pytest.raises(StoreError, match="not a store"):
        assembled(Sources(stores=(tmp_path,)), small_tokenizer)


def test_ids_that_the_model_does_not_know_are_cut_out(
    small_store: Path, small_crest: Path, small_tokenizer: TextTokenizer
) -> None:
    size = small_tokenizer.vocab_size - 60
    for path in (small_store, small_crest):
        alone, cut = open_store(path).drafter(), 0
        with assembled(Sources(stores=(path,)), small_tokenizer, size) as assembly:
            for context in some_contexts(small_store):
                if max(context) < size:
                    tree, whole = draft(assembly, context), alone.session(context).propose(32)
                    tree.validate()
                    assert texts(tree) == {text for text in texts(whole) if max(text) < size}
                    cut += len(whole) - len(tree)
        assert cut > 0


def texts(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return what the nodes of a draft say, each with all before it."""
    return {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


def test_a_model_with_padded_matrices_may_emit_the_padding(
    small_store: Path, small_crest: Path, small_tokenizer: TextTokenizer
) -> None:
    size = small_tokenizer.vocab_size
    for path in (small_store, small_crest):
        alone = open_store(path).drafter()
        with assembled(Sources(stores=(path,)), small_tokenizer, size + 100_000) as assembly:
            for context in some_contexts(small_store):
                session = assembly.session(context)
                assert session.propose(32) == alone.session(context).propose(32)
                session.observe([size + 99_999])
                assert len(session.propose(32)) == 0
                session.observe(context[-2:])
                assert session.propose(32) == alone.session([-1, *context[-2:]][1:]).propose(32)


# --- stores of hidden states ---


@pytest.fixture
def small_dense(tmp_path: Path, small_store: Path, small_tokenizer: TextTokenizer) -> Path:
    """Write a store of hidden states over some texts."""
    return make_dense_store(
        tmp_path / "dense", some_contexts(small_store), tokenizer=small_tokenizer, target_model=MODEL
    )


def asked_of(store: DresdStore, token: int) -> NDArray[np.float32]:
    """Return the query that the first entry behind a token is nearest to."""
    first = int(store.index.groups[token])
    query: NDArray[np.float32] = store.index.vectors[first].view(np.float16).astype(np.float32)
    return query


def some_queries(path: Path) -> list[tuple[int, NDArray[np.float32]]]:
    """Return tokens that entries begin with, each with a projected state like that of one."""
    store = DresdStore.open(path)
    tokens = np.flatnonzero(np.diff(store.index.groups))[:20]
    return [(token, asked_of(store, token)) for token in tokens.tolist()]


def test_a_dense_store_drafts_as_it_does_alone(small_dense: Path, small_tokenizer: TextTokenizer) -> None:
    for strategy in (None, "deep"):
        store = DresdStore.open(small_dense)
        alone = store.drafter(strategy or store.default_strategy)
        sources = Sources(stores=(small_dense,), strategy=strategy)
        with assembled(sources, small_tokenizer) as assembly:
            assert [(part.kind, part.name) for part in assembly.parts] == [("dresd", "dense")]
            assert assembly.projection is not None
            assert assembly.projection.digest == store.projection.digest
            for token, query in some_queries(small_dense):
                session = assembly.session([3, token], hidden=query)
                assert session.needs_hidden
                assert projection_of(session) is assembly.projection
                tree = session.propose(32)
                assert tree == alone.session([token], hidden=query).propose(32)
                assert len(tree) > 0
                session.observe([token], hidden=query)
                assert session.propose(32) == tree


def test_hidden_states_of_another_model_are_refused_with_both_names(
    small_dense: Path, small_tokenizer: TextTokenizer
) -> None:
    sources = Sources(stores=(small_dense,))
    known: dict[str, Any] = {"vocab_size": small_tokenizer.vocab_size, "tokenizer": small_tokenizer.identity}
    with pytest.raises(StoreError, match=f"'{MODEL}', found 'other/model'"):
        assemble(sources, model="other/model", **known)
    with pytest.raises(StoreError, match="states of 16 numbers, the model's have 17"):
        assemble(sources, model=MODEL, hidden_size=17, **known)
    with pytest.raises(TokenizerError, match=r"'small-bpe'.*found 'other'"):
        assemble(sources, model=MODEL, **(known | {"tokenizer": OTHER}))
    with assemble(sources, model=MODEL, hidden_size=16, **known) as assembly:
        assert assembly.part("dresd") is not None


@pytest.mark.parametrize(
    ("strategy", "follows"),
    [(None, []), ("longest", ["rest", "crest"]), ("backoff", ["rest", "crest"]), ("deep", ["dresd"])],
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
        part = assembly.part("rest")
        assert part is not None
        for context in some_contexts(small_store):
            session = part.drafter.session(context)
            assert session.propose(32) == alone.session(context).propose(32)


def test_a_strategy_that_nothing_follows_is_refused(
    small_store: Path, small_dense: Path, small_tokenizer: TextTokenizer
) -> None:
    with pytest.raises(DraftstoreError, match=r"knows the strategy 'deep' \(small\): leave the strategy out"):
        assembled(Sources(stores=(small_store,), strategy="deep"), small_tokenizer)
    with pytest.raises(DraftstoreError, match=r"'longest' \(the request itself, dense\)"):
        assembled(Sources(stores=(small_dense,), strategy="longest", request=True), small_tokenizer)


@pytest.mark.parametrize("more", [-60, 100_000])
def test_a_dense_store_and_a_model_of_other_ids(
    small_dense: Path, small_tokenizer: TextTokenizer, more: int
) -> None:
    size = small_tokenizer.vocab_size + more
    alone, nodes = DresdStore.open(small_dense).drafter(), 0
    with assembled(Sources(stores=(small_dense,)), small_tokenizer, size) as assembly:
        for token, query in some_queries(small_dense):
            if token < size:
                session = assembly.session([token], hidden=query)
                tree, whole = session.propose(32), alone.session([token], hidden=query).propose(32)
                tree.validate()
                assert texts(tree) == {text for text in texts(whole) if max(text) < size}
                nodes += len(tree)
                session.observe([size - 1], hidden=query)
                assert more < 0 or len(session.propose(32)) == 0
    assert nodes > 0


def test_recycled_candidates_are_a_start_for_their_own_model(
    tmp_path: Path, small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    size = small_tokenizer.vocab_size
    drafter = RecyclingDrafter(size, matrix=np.array([[1, 2], [3, -1]], np.int32))
    stores = {name: tmp_path / name.replace("/", "-") for name in ("organisation/model", "other/model")}
    for name, path in stores.items():
        save_recycling(drafter, path, target_model=name, tokenizer=small_tokenizer.identity)
    sources = Sources(stores=(stores["organisation/model"],), recycling=True)
    with assembled(sources, small_tokenizer) as assembly:
        assert [part.kind for part in assembly.parts] == ["recycling"], "and no second, cold one"
        assert set(draft(assembly, [0]).tokens.tolist()) >= {1, 2, 3}
    with pytest.raises(StoreError, match="'other/model'"):
        assembled(Sources(stores=(stores["other/model"],)), small_tokenizer)


def test_a_release_of_the_lookup_service_drafts_as_the_store(
    small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    alone = open_store(small_store).drafter()
    with serving({"chat": small_store}) as lookups, lookups.caller() as caller:
        caller.draft(
            "chat", contexts_of(small_store, 1)
        )  # kernels may have to be compiled, clients do not wait
        sources = Sources(lookup=str(lookups.socket), release="chat", deadline=SECONDS)
        with assembled(sources, small_tokenizer) as assembly:
            assert [(part.kind, part.name) for part in assembly.parts] == [("lookup", "chat")]
            for context in some_contexts(small_store):
                assert draft(assembly, context) == alone.session(context).propose(32)


def test_a_release_on_several_services_drafts_as_its_partitions(
    small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    alone = PartitionedDrafter([open_store(small_store).drafter()] * 2)
    with serving({"chat": small_store}) as first, serving({"chat": small_store}) as second:
        sources = Sources(lookup=f"{first.socket},{second.socket}", release="chat", deadline=SECONDS)
        with assembled(sources, small_tokenizer) as assembly:
            assert [(part.kind, part.name) for part in assembly.parts] == [("lookup", "chat")]
            for context in some_contexts(small_store):
                assert draft(assembly, context) == alone.session(context).propose(32)
        with pytest.raises(DraftstoreError, match="name one; it serves chat"):
            assembled(dataclasses.replace(sources, release=None), small_tokenizer)


def test_a_dense_release_drafts_as_the_store_for_its_own_model(
    small_store: Path, small_dense: Path, small_tokenizer: TextTokenizer
) -> None:
    alone = DresdStore.open(small_dense).drafter("deep")
    known: dict[str, Any] = {"vocab_size": small_tokenizer.vocab_size, "tokenizer": small_tokenizer.identity}
    with serving({"dense": small_dense}) as lookups:
        there = Sources(lookup=str(lookups.socket), release="dense", strategy="deep", deadline=SECONDS)
        for stores in ((), (small_store,)):
            sources = dataclasses.replace(there, stores=stores)
            with assemble(sources, model=MODEL, hidden_size=16, **known) as assembly:
                assert [part.kind for part in assembly.parts if part.strategy] == ["lookup"]
                part = assembly.part("lookup")
                assert part is not None
                assert assembly.projection is projection_of(part.drafter) is not None
                for token, query in some_queries(small_dense):
                    tree = part.drafter.session([token], hidden=query).propose(32)
                    assert tree == alone.session([token], hidden=query).propose(32)
        with pytest.raises(LookupServiceError, match=f"'{MODEL}', expected 'other/model'"):
            assemble(there, model="other/model", **known)
        with pytest.raises(LookupServiceError, match="states of 16 numbers, this model's have 17"):
            assemble(there, model=MODEL, hidden_size=17, **known)


def test_the_lookup_service_is_checked_at_the_start(
    tmp_path: Path, small_store: Path, small_tokenizer: TextTokenizer
) -> None:
    with serving({"chat": small_store}) as lookups:
        where = str(lookups.socket)
        with pytest.raises(LookupServiceError, match="code"):
            assembled(Sources(lookup=where, release="code"), small_tokenizer)
        size = small_tokenizer.vocab_size
        with pytest.raises(LookupServiceError, match="tokenizer"):
            assemble(Sources(lookup=where, release="chat"), vocab_size=size, tokenizer=OTHER)
        with pytest.raises(DraftstoreError, match="name one; it serves chat"):
            assembled(Sources(lookup=where), small_tokenizer)
    with pytest.raises(LookupServiceError, match="draftstore serve"):
        assembled(Sources(lookup=str(tmp_path / "none.sock"), release="chat"), small_tokenizer)
    with pytest.raises(DraftstoreError, match="is named: name one"):
        assembled(Sources(lookup=str(tmp_path / "none.sock")), small_tokenizer)


def test_what_was_opened_is_closed(
    monkeypatch: pytest.MonkeyPatch, small_store: Path, small_crest: Path, small_tokenizer: TextTokenizer
) -> None:
    closed = []
    opened = [open_store(small_store), open_store(small_crest)]
    for store in opened:
        monkeypatch.setattr(store, "close", lambda store=store: closed.append(store))
    stores = dict(zip((small_store, small_crest), opened, strict=True))
    monkeypatch.setattr("draftstore.assembly.open_store", lambda path, _backend: stores[path])
    with assembled(Sources(stores=(small_store, small_crest), request=True), small_tokenizer):
        assert closed == []
    assert closed == opened[::-1]
    closed.clear()
    with pytest.raises(StoreError, match="not a store"):  # what comes after it cannot be opened
        assembled(Sources(stores=(small_store, small_store.parent)), small_tokenizer)
    assert closed == opened[:1]

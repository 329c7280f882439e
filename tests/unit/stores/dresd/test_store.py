import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, StoreError, TokenizerError
from draftstore.storage.manifest import (
    TokenizerIdentity,
    load_manifest,
    save_manifest,
    verify_files,
)
from draftstore.stores.dresd.kernels.dense_tree import CALIBRATION
from draftstore.stores.dresd.kernels.nearest import ALL, project, search
from draftstore.stores.dresd.store import FILES, STRATEGIES, DresdStore
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree
from tests import reference
from tests.fakes.dense_stores import (
    MODEL,
    TOKENIZER,
    make_dense_store,
    make_projection,
    make_states,
    rewrite,
)
from tests.reference import Documents, UnclearError, nodes_of

VOCAB = 50


def salad(documents: int, seed: int = 0, ids: tuple[int, ...] = (3, 4, 5, 6, 49)) -> Documents:
    """Return documents of few different tokens, the first of them the most common, some without a token."""
    draw = random.Random(seed)
    weights = [2.0**-place for place in range(len(ids))]
    return [draw.choices(ids, weights, k=draw.randint(0, 40)) for _ in range(documents)]


DOCUMENTS = salad(30)
STATES = make_states(DOCUMENTS)
PROJECTION = make_projection()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with small and large groups; tests must not change it."""
    path = make_dense_store(
        tmp_path_factory.mktemp("dresd") / "store", DOCUMENTS, STATES, projection=PROJECTION, large=30
    )
    store = DresdStore.open(path)
    sizes = np.diff(store.index.groups)
    assert len(store.index.centroids) > 10
    assert np.any((sizes > 0) & (np.diff(store.index.group_lists) == 0))
    return path


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """Return a copy of the store that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "store"))


def refusal(store: Path, **wanted: Any) -> str:
    """Open a store that does not open; return what is said about it."""
    with pytest.raises(StoreError) as caught:
        DresdStore.open(store, **wanted)
    return str(caught.value)


def change_array(store: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Change an array of a store and let its manifest agree with the file."""
    manifest = load_manifest(store)
    array = np.fromfile(store / name, FILES[name](manifest))
    rewrite(store, manifest, name, change(array).astype(array.dtype).tobytes())
    assert verify_files(store, load_manifest(store)) == []


def edit_manifest(store: Path, **fields: Any) -> None:
    path = store / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")


def edit_parameters(store: Path, **parameters: Any) -> None:
    """Change parameters; `...` takes one away."""
    merged = {**load_manifest(store).parameters, **parameters}
    edit_manifest(store, parameters={key: value for key, value in merged.items() if value is not ...})


def questions(
    documents: Documents = DOCUMENTS,
    states: list[NDArray[np.float32]] = STATES,
    most: int = 40,
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return contexts and hidden states as of a model that says these documents again, with a little noise."""
    rng = np.random.default_rng(1)
    places = [
        (number, place) for number, document in enumerate(documents) for place in range(len(document) - 1)
    ]
    places = [places[i] for i in rng.permutation(len(places))[:most]]
    contexts = [[documents[number][place + 1]] for number, place in places]
    hidden = np.stack([states[number][place] for number, place in places])
    hidden += 0.1 * rng.standard_normal(hidden.shape).astype(np.float32)
    return np.array(contexts, np.int32), hidden.astype(np.float16)


# -- opening -------------------------------------------------------------------------------------------------


def test_positions_may_have_64_bits(built: Path, tmp_path: Path) -> None:
    wide = make_dense_store(
        tmp_path / "wide", DOCUMENTS, STATES, projection=PROJECTION, large=30, wide_positions=True
    )
    stores = DresdStore.open(built), DresdStore.open(wide, target_model=MODEL, hidden_size=16)
    assert [store.index.positions.dtype for store in stores] == [np.uint32, np.uint64]
    assert not any(array.flags.writeable for array in (stores[0].tokens, *stores[0].index))
    contexts, hidden = questions()
    drafts, same = (store.drafter().draft(contexts, hidden=hidden) for store in stores)
    assert drafts == same


def test_another_model_tokenizer_or_size_is_refused(built: Path) -> None:
    assert "of the model 'org/model', found 'org/other'" in refusal(built, target_model="org/other")
    assert "of 16 numbers, the model's have 576" in refusal(built, hidden_size=576)
    other = TokenizerIdentity("letters", "cd" * 32)
    with pytest.raises(TokenizerError, match=r"with tokenizer 'words' .*, found 'letters'"):
        DresdStore.open(built, tokenizer=other)
    renamed = dataclasses.replace(TOKENIZER, name="renamed")
    assert DresdStore.open(str(built), tokenizer=renamed).manifest.tokenizer == TOKENIZER


def test_another_projection_is_refused(store: Path) -> None:
    other = make_projection(seed=1)
    rewrite(store, load_manifest(store), "projection.bin", other.to_bytes())
    message = refusal(store)
    assert PROJECTION.digest[:12] in message
    assert other.digest[:12] in message
    rewrite(store, load_manifest(store), "projection.bin", b"")
    assert "are not a projection to 8 dimensions" in refusal(store)
    rewrite(store, load_manifest(store), "projection.bin", bytes(8 * 18 * 4))
    assert "projects states of 17 numbers, expected 16" in refusal(store)
    rewrite(store, load_manifest(store), "projection.bin", other.to_bytes())
    edit_parameters(store, projection=other.digest)
    DresdStore.open(store)
    edit_parameters(store, projection=PROJECTION.digest)
    assert "built with the projection" in refusal(store)


@pytest.mark.parametrize(
    "parameters",
    [
        {name: value}
        for name, values in {
            "dims": (..., True, 0, 9),
            "hidden_size": (0, 15),
            "layer": ("first",),
            "probing": (1, 0.0, 1.5),
        }.items()
        for value in values
    ],
    ids=str,
)
def test_parameters_that_make_no_sense_are_refused(store: Path, parameters: dict[str, Any]) -> None:
    edit_parameters(store, **parameters)
    assert str(store) in refusal(store)


def put(place: int, value: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a change of one item of an array to a value."""

    def change(array: NDArray[Any]) -> NDArray[Any]:
        array[place] = value
        return array

    return change


MISFITS: dict[str, tuple[str, Callable[[NDArray[Any]], NDArray[Any]], str]] = {
    "part of a vector": ("vectors.bin", lambda a: a[:-1], "not rows of 8"),
    "a vector more": ("vectors.bin", lambda a: np.append(a, a[:8]), "vectors.bin holds"),
    "a position less": ("positions.bin", lambda a: a[:-1], "positions.bin holds"),
    "a group less": ("groups.bin", lambda a: a[:-1], "groups.bin holds 50 rows, expected 51"),
    "groups that start late": ("groups.bin", put(0, 1), "groups.bin does not ascend from 0"),
    "groups that jump": ("groups.bin", put(5, 1 << 40), "groups.bin does not ascend"),
    "a table of lists less": ("group_lists.bin", lambda a: a[:-1], "group_lists.bin holds 50 rows"),
    "lists of another group": ("group_lists.bin", put(3, 1), "does not cover the groups"),
    "a list less": ("lists.bin", lambda a: a[:-1], "lists.bin holds"),
    "lists that do not ascend": ("lists.bin", put(2, 0), "lists.bin does not ascend"),
    "lists beyond the entries": ("lists.bin", put(-1, 1 << 40), "does not cover the groups"),
    "lists that start behind their group": ("lists.bin", put(0, 1), "does not cover the groups"),
    "a centroid less": ("centroids.bin", lambda a: a[:-8], "expected"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_tables_that_do_not_fit_each_other_are_refused(store: Path, name: str) -> None:
    file, change, message = MISFITS[name]
    change_array(store, file, change)
    assert message in refusal(store)
    assert "the store is damaged" in refusal(store)


def test_a_file_that_the_manifest_leaves_out_is_named(store: Path) -> None:
    manifest = load_manifest(store)
    files = {name: entry for name, entry in manifest.files.items() if name != "lists.bin"}
    save_manifest(store, dataclasses.replace(manifest, files=files))
    assert "its manifest does not list lists.bin" in refusal(store)


def test_random_positions_tokens_and_vectors_give_valid_trees(store: Path) -> None:
    """Positions, tokens and vectors may be anything: drafts are trees of ids that exist."""
    contexts, hidden = questions()
    rng = np.random.default_rng(0)
    for name, most in (("positions.bin", 2**32), ("tokens.bin", 2**16), ("vectors.bin", 2**16)):
        manifest = load_manifest(store)
        size = manifest.files[name].size
        numbers = rng.integers(0, most, size // 2, np.uint32 if most > 2**16 else np.uint16)
        rewrite(store, manifest, name, numbers.tobytes()[:size])
        for strategy in STRATEGIES:
            for draft in DresdStore.open(store).drafter(strategy, drafts=40).draft(contexts, hidden=hidden):
                draft.tree.validate()
                assert draft.tree.tokens.max(initial=0) < VOCAB


# -- drafting ------------------------------------------------------------------------------------------------


def expected_drafts(
    store: DresdStore,
    contexts: NDArray[np.int32],
    hidden: NDArray[np.float16],
    drafts: int,
    length: int,
    budget: int,
) -> Iterator[tuple[reference.Nodes | None, int]]:
    """Yield what an oracle drafts from the files of a store, and the size of the group; None where that is unclear."""
    vectors = store.index.vectors.view(np.float16).astype(np.float64)
    queries = project(store.projection.weights, store.projection.bias, hidden.astype(np.float32))
    entries, cosines, _ = search(store.index, queries, contexts[:, -1].copy(), drafts, ALL)
    firsts = [int(store.tokens[int(position) - 1]) for position in store.index.positions]
    for row, (context, query) in enumerate(zip(contexts[:, -1].tolist(), queries.astype(float), strict=True)):
        group = [entry for entry, first in enumerate(firsts) if first == context]
        products = dict(zip(group, vectors[group] @ (query / np.linalg.norm(query)), strict=True))
        ranking = [entry for entry in entries[row].tolist() if entry >= 0]
        similarities = cosines[row, : len(ranking)].tolist()
        np.testing.assert_allclose(similarities, [products[entry] for entry in ranking], atol=1e-6)
        assert len(ranking) == min(drafts, len(group))
        assert all(products[entry] < similarities[-1] + 1e-6 for entry in set(group) - set(ranking))
        near = [
            (similarity, reference.rest_of_document(store.tokens, int(store.index.positions[entry]), length))
            for entry, similarity in zip(ranking, similarities, strict=True)
        ]
        try:
            yield reference.dense_tree(near, CALIBRATION, budget), len(group)
        except UnclearError:
            yield None, len(group)


@pytest.mark.parametrize(("drafts", "length"), [(10, 10), (1, 1), (30, 20)])
def test_drafts_of_a_store_are_those_of_the_oracle(tmp_path: Path, drafts: int, length: int) -> None:
    path = make_dense_store(tmp_path / "store", DOCUMENTS, STATES, projection=PROJECTION)
    store = DresdStore.open(path)
    contexts, hidden = questions()
    contexts[0], contexts[1] = 7, -1  # a token that no entry has, and none
    drafter = store.drafter(drafts=drafts, length=length, probing=ALL)
    found = drafter.draft(contexts, 40, hidden=hidden)
    compared = 0
    for draft, (nodes, size) in zip(
        found, expected_drafts(store, contexts, hidden, drafts, length, 40), strict=True
    ):
        assert (draft.match_length, draft.match_count) == (int(size > 0), size)
        if nodes is not None:
            assert nodes_of(draft.tree) == nodes
            compared += 1
    assert compared > len(contexts) // 2


def test_a_batch_gives_the_drafts_of_single_calls(built: Path) -> None:
    drafter = DresdStore.open(built).drafter()
    contexts, hidden = questions()
    hidden[3], hidden[5, 2], hidden[6], hidden[7, 1] = np.nan, np.nan, np.inf, -np.inf
    contexts[8] = VOCAB
    wide = np.concatenate([np.full_like(contexts, 9), contexts], axis=1)
    together = drafter.draft(wide, 30, 0.01, hidden=hidden)
    for row, draft in enumerate(together):
        [alone] = drafter.draft(contexts[row : row + 1], 30, 0.01, hidden=hidden[row : row + 1])
        assert alone == draft
        draft.tree.validate()
        assert len(draft.tree) <= 30
        assert np.all(draft.tree.probs >= 0.01)
    for row in (3, 5, 6, 7, 8):
        assert together[row] == Draft(DraftTree.empty(), 0, 0)
    assert sum(len(draft.tree) > 0 for draft in together) > len(together) // 2
    assert drafter.draft_batch(wide, 30, 0.01, hidden=hidden).encode_trees()[0].shape == (len(wide),)


def test_without_states_or_entries_nothing_is_drafted(built: Path, tmp_path: Path) -> None:
    drafter = DresdStore.open(built).drafter()
    contexts, hidden = questions(most=4)
    for draft in [*drafter.draft(contexts), *drafter.draft(np.empty((4, 0), np.int32), hidden=hidden)]:
        assert draft == Draft(DraftTree.empty(), 0, 0)
    assert drafter.draft(np.empty((0, 1), np.int32), hidden=np.empty((0, 16), np.float16)) == []
    drafter.warm_up()
    empty = DresdStore.open(make_dense_store(tmp_path / "none", [[3, 4], [5]], vocab_size=6)).drafter()
    assert empty.draft(np.array([[4]], np.int32), hidden=np.ones((1, 16), np.float16)) == [
        Draft(DraftTree.empty(), 0, 0)
    ]


def test_impossible_requests_are_refused(built: Path) -> None:
    store = DresdStore.open(built)
    contexts, hidden = questions(most=4)
    for wrong in (hidden[:3], hidden[:, :15], hidden[0]):
        with pytest.raises(
            DraftstoreError, match=r"expected \(4, 16\): use a store that was built with this model"
        ):
            store.drafter().draft(contexts, hidden=wrong)
    for budget in (-1, 4097):
        with pytest.raises(DraftstoreError, match="expected 0 to 4096"):
            store.drafter().draft(contexts, budget, hidden=hidden)
    with pytest.raises(DraftstoreError, match="contexts are int32"):
        store.drafter().draft(contexts[0], hidden=hidden)
    with pytest.raises(DraftstoreError, match=r"unknown strategy 'high': expected one of deep, many, wide"):
        store.drafter("high")
    for changes in (
        {"drafts": 0}, {"drafts": 1025}, {"length": 0}, {"length": 64}, {"probing": 0.0}, {"probing": 1.5},
        {"probing": float("nan")},
    ):  # fmt: skip
        with pytest.raises(DraftstoreError, match=r"expected"):
            store.drafter(**changes)


# -- sessions ------------------------------------------------------------------------------------------------


def test_a_session_asks_with_the_state_that_predicted_the_last_token(built: Path) -> None:
    drafter = DresdStore.open(built).drafter()
    document, rows = next((d, s) for d, s in zip(DOCUMENTS, STATES, strict=True) if len(d) > 20)
    session = drafter.session(document[:3], hidden=rows[1])
    assert session.needs_hidden
    assert not session.needs_candidates
    for size in (3, 4, 8, 15):
        [draft] = drafter.draft(
            np.array([[document[size - 1]]], np.int32), hidden=rows[size - 2 : size - 1].astype(np.float16)
        )
        assert session.propose() == draft.tree
        assert len(draft.tree) > 0
        agreed = draft.tree.accepted(np.array(document[size:], np.int32))
        assert len(agreed) == min(10, len(document) - size), "the entry itself is the nearest"
        after = {3: 4, 4: 8, 8: 15, 15: 16}[size]
        session.observe(document[size:after], tree=draft.tree, hidden=rows[after - 2])


def test_a_session_without_a_state_drafts_nothing(built: Path) -> None:
    drafter = DresdStore.open(built).drafter()
    document, states = DOCUMENTS[0], STATES[0]
    session = drafter.session(document[:3])
    assert session.propose() == DraftTree.empty()
    session.observe(document[3:4], hidden=states[2])
    assert len(session.propose())
    for hidden in (None, np.full(16, np.nan, np.float32), np.full(16, 7e4, np.float32)):
        session.observe(document[4:5], hidden=hidden)
        assert session.propose() == DraftTree.empty()
    session = drafter.session(document[:3], hidden=states[1], candidates=np.zeros((1, 8), np.int32))
    assert len(session.propose(5)) == 5
    assert drafter.session([], hidden=states[1]).propose() == DraftTree.empty()


# -- sizes ---------------------------------------------------------------------------------------------------

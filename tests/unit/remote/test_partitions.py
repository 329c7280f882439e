"""Partitions on several services: asked at once, joined as local ones, and none keeps the others from drafting."""

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.assembly import Sources, assemble
from draftstore.drafting.partitions import PartitionedDrafter
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.remote.client import RemoteStore
from draftstore.remote.connection import Connection
from draftstore.remote.counters import Outcome
from draftstore.remote.partitions import RemotePartitions, addresses_of, open_release
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.partition import Partition
from draftstore.stores.registry import Store, open_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import Draft
from services.lookup.stores.served import OpenStores, open_served
from services.lookup.stores.targets import Target
from tests.fakes.clients import contexts_of
from tests.fakes.faults import FAULTS, TOKENIZER, Peer, Service
from tests.fakes.lookups import serving
from tests.fakes.waiting import SECONDS

IDENTITY = TokenizerIdentity("small", TOKENIZER)
SOON = 0.2
"""Seconds to wait for a service that does not answer."""


@pytest.fixture
def stores(small_store: Path, small_crest: Path) -> Iterator[list[Store]]:
    opened = [open_store(small_store), open_store(small_crest)]
    yield opened
    for store in opened:
        store.close()


@pytest.fixture
def contexts(stores: list[Store]) -> NDArray[np.int32]:
    index = stores[0].index  # type: ignore[attr-defined]
    story = index.tokens[:600].astype(np.int64)
    return contexts_of(stores[0].drafter(), story[story < index.vocab_size].tolist(), 20)


def as_bytes(drafts: list[Draft]) -> list[tuple[bytes, int, int]]:
    return [(draft.tree.to_bytes(), draft.match_length, draft.match_count) for draft in drafts]


def locally(
    stores: Sequence[Store], contexts: NDArray[np.int32], budget: int = 64
) -> list[tuple[bytes, int, int]]:
    return as_bytes(PartitionedDrafter([store.drafter() for store in stores]).draft(contexts, budget))


def test_the_drafts_of_local_partitions_byte_for_byte(
    stores: list[Store], contexts: NDArray[np.int32]
) -> None:
    with (
        Service(stores[0]) as first,
        Service(stores[1], tcp=True) as second,
        RemotePartitions([first.address, second.address], "chat", deadline=SECONDS) as remote,
    ):
        drafter = remote.drafter()
        for batch in (0, 1, 2, 20):
            for budget in (0, 1, 64):
                drafts = as_bytes(drafter.draft(contexts[:batch], budget))
                assert drafts == locally(stores, contexts[:batch], budget)
        text = contexts[0][contexts[0] >= 0]
        expected = PartitionedDrafter([store.drafter() for store in stores]).session(text).propose(32)
        assert drafter.session(text).propose(32) == expected
        many = np.resize(contexts, (513, 16))  # two requests to each
        assert as_bytes(drafter.draft(many, 8)) == locally(stores, many, 8)


def test_all_are_asked_before_one_is_waited_for(stores: list[Store], contexts: NDArray[np.int32]) -> None:
    met = threading.Barrier(2)

    def together(peer: Peer) -> None:
        peer.send(
            peer.service.answer(peer.read())
        )  # the first draft opens the connections, one after the other
        while True:
            frame = peer.read()
            met.wait(SECONDS)
            peer.send(peer.service.answer(frame))

    with (
        Service(stores[0], together) as first,
        Service(stores[1], together) as second,
        RemotePartitions([first.address, second.address], "chat", deadline=SECONDS) as remote,
    ):
        drafter = remote.drafter()
        for _ in range(3):
            assert as_bytes(drafter.draft(contexts)) == locally(stores, contexts)
        assert all(store.counters["answered"] == 3 for store in remote.partitions)


def test_a_request_that_is_not_read_keeps_no_other_waiting(
    stores: list[Store], contexts: NDArray[np.int32]
) -> None:
    def stuck(peer: Peer) -> None:
        peer.send(peer.service.answer(peer.read()))
        peer.wait()

    large = np.resize(contexts, (32, 4000))  # more than a socket takes
    with (
        Service(stores[0], stuck) as service,
        RemoteStore(service.address, "chat", deadline=SECONDS) as store,
    ):
        drafter = store.drafter()
        drafter.draft(contexts[:1])
        began = monotonic()
        drafter.begin(large).give_up()
        assert monotonic() < began + SECONDS  # it was not waited until the end


def test_a_large_answer_that_came_while_another_was_waited_for(
    stores: list[Store], contexts: NDArray[np.int32]
) -> None:
    sent = threading.Event()

    def first_to_answer(peer: Peer) -> None:
        while True:
            peer.send(peer.service.answer(peer.read()))
            sent.set()

    def last_to_answer(peer: Peer) -> None:
        while True:
            frame = peer.read()
            sent.wait(SECONDS)
            peer.send(peer.service.answer(frame))

    many = np.resize(contexts, (400, 16))
    with (
        Service(stores[0], last_to_answer) as first,
        Service(stores[1], first_to_answer, tcp=True) as second,
        RemotePartitions([first.address, second.address], "chat", deadline=SECONDS) as remote,
    ):
        drafter = remote.drafter()
        drafter.draft(contexts[:1])
        sent.clear()
        remote.partitions[1].deadline = 1e-6
        assert as_bytes(drafter.draft(many)) == locally(stores, many)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_service_that_fails_leaves_out_its_partition(
    fault: str, stores: list[Store], contexts: NDArray[np.int32]
) -> None:
    behave, outcome = FAULTS[fault]
    alone = as_bytes(stores[0].drafter().draft(contexts[:3]))
    known: dict[str, Any] = {
        "deadline": SOON if outcome is Outcome.TIMEOUT else SECONDS,
        "tokenizer": IDENTITY,
        "vocab_size": stores[0].manifest.vocab_size,
    }
    with (
        Service(stores[0]) as first,
        Service(stores[1], behave) as second,
        RemotePartitions([second.address, first.address], "chat", **known) as remote,
    ):
        remote.partitions[1].deadline = SECONDS
        assert as_bytes(remote.drafter().draft(contexts[:3])) == alone
        assert remote.partitions[0].counters[outcome] == remote.partitions[0].counters.calls == 1


def test_a_service_that_comes_back_takes_part_again(stores: list[Store], contexts: NDArray[np.int32]) -> None:
    with (
        Service(stores[0]) as first,
        Service(stores[1]) as second,
        RemotePartitions([first.address, second.address], "chat", deadline=SECONDS) as remote,
    ):
        drafter = remote.drafter()
        both = locally(stores, contexts)
        assert as_bytes(drafter.draft(contexts)) == both
        second.stop()
        second.start()  # the connection that is kept leads nowhere: asked again on a new one
        assert as_bytes(drafter.draft(contexts)) == both
        assert remote.partitions[1].counters["retries"] >= 1
        second.stop()
        assert as_bytes(drafter.draft(contexts)) == as_bytes(stores[0].drafter().draft(contexts))
        second.start()


def test_an_interrupt_leaves_no_half_answer(
    stores: list[Store], contexts: NDArray[np.int32], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Service(stores[0]) as first,
        Service(stores[1]) as second,
        RemotePartitions([first.address, second.address], "chat", deadline=SECONDS) as remote,
    ):
        drafter = remote.drafter()
        drafter.draft(contexts)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Connection, "_receive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                drafter.draft(contexts[:2])
        assert as_bytes(drafter.draft(contexts)) == locally(stores, contexts)

        with monkeypatch.context() as patch:
            patch.setattr(remote.partitions[1]._pool, "begin", interrupt)
            with pytest.raises(KeyboardInterrupt):
                drafter.draft(contexts[:2])
        assert not remote.partitions[0]._pool._all  # the connection that owes an answer is closed
        assert as_bytes(drafter.draft(contexts)) == locally(stores, contexts)


def test_partitions_must_fit_each_other(
    small_store: Path, small_crest: Path, wide_store: Path, small_dense: Path
) -> None:
    served = {"one": small_store, "two": small_crest, "wide": wide_store, "dense": small_dense}
    with serving(served) as lookups, serving(served) as others:
        places = [str(lookups.place.socket), str(others.place.socket)]
        with RemotePartitions(places, "one", deadline=SECONDS) as remote:
            assert remote.check("longest")["kind"] == "rest"
        with RemotePartitions(places, "dense", deadline=SECONDS) as remote:
            remote.check()
            with pytest.raises(DraftstoreError, match="dense store cannot be a partition"):
                remote.drafter()
    for name, message in (("two", "kind 'crest'"), ("wide", "tokenizer")):
        with serving({"chat": served["one"]}) as lookups, serving({"chat": served[name]}) as others:
            places = [str(lookups.place.socket), str(others.place.socket)]
            with (
                RemotePartitions(places, "chat", deadline=SECONDS) as remote,
                pytest.raises(LookupServiceError, match=message),
            ):
                remote.check()


def parts_of(path: Path, *partitions: Partition) -> list[OpenStores]:
    opened = []
    for partition in partitions:
        opened.append(OpenStores())
        opened[-1].put("chat", open_served(Target("chat", path), partition))
    return opened


def test_the_parts_of_one_store(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "once upon a time there was {number}"}}\n' for number in range(99)))
    path = build_rest(
        RestOptions((texts,), "cut", segment_tokens=400), small_tokenizer, tmp_path / "store"
    ).path
    first, second, again = parts_of(path, Partition(1, 2), Partition(2, 2), Partition(1, 2))
    with (
        closing(RestStore.open(path)) as store,
        serving(first) as one,
        serving(second) as two,
        serving(again) as third,
        serving({"chat": path}) as whole,
    ):
        index = store.index
        contexts = index.tokens[: 16 * 20].astype(np.int32).reshape(20, 16)
        contexts[contexts >= index.vocab_size] = -1
        places = [str(each.place.socket) for each in (one, two, third)]
        with RemotePartitions(places[:2], "chat", deadline=SECONDS) as remote:
            assert remote.check()["partition"] == "1/2"
            halves = [store.take(Partition(number, 2))[0] for number in (1, 2)]
            assert as_bytes(remote.drafter().draft(contexts)) == locally(halves, contexts)
        for wrong in (
            places[1:2] + places[:1] + places[2:],
            places[::2],
            [places[0], str(whole.place.socket)],
        ):
            with (
                RemotePartitions(wrong, "chat", deadline=SECONDS) as remote,
                pytest.raises(LookupServiceError, match=r"of 'chat' the services have the parts .*1/[12]"),
            ):
                remote.check()
        sources = Sources(lookup=places[0], release="chat", deadline=SECONDS)
        known: Any = {"vocab_size": small_tokenizer.vocab_size, "tokenizer": small_tokenizer.identity}
        with pytest.raises(LookupServiceError, match="have the parts 1/2: expected every part"):
            assemble(sources, **known)
        assemble(dataclasses.replace(sources, lookup=",".join(places[:2])), **known).close()


@pytest.mark.parametrize("addresses", [[], ["a:1", "tcp://a:1"]])
def test_every_partition_has_an_address(addresses: list[str]) -> None:
    with pytest.raises(DraftstoreError, match="one address for each"):
        RemotePartitions(addresses, "chat")


def test_addresses_with_commas_are_partitions(stores: list[Store]) -> None:
    assert addresses_of(None) == [None]
    assert addresses_of("a:1, b:2") == ["a:1", "b:2"]
    with Service(stores[0]) as first, Service(stores[1]) as second:
        with open_release(first.address, "chat") as one:
            assert isinstance(one, RemoteStore)
        with open_release(f"{first.address},{second.address}", "chat") as two:
            assert isinstance(two, RemotePartitions)
            assert [str(store.address) for store in two.partitions] == [
                f"unix:{first.address}", f"unix:{second.address}",
            ]  # fmt: skip

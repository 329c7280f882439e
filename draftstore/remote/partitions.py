"""A release that lies in partitions, each served by a lookup service of its own: all are asked at the same time.

    store = RemotePartitions(["tcp://first:7781", "tcp://second:7781"], "web", deadline=0.005)
    store.check()                                            # every partition answers, and fits the others
    drafter = store.drafter()

Drafts are those of `draftstore.drafting.partitions.PartitionedDrafter` over the same stores, byte for byte. A service
that fails, or does not answer in time, leaves its partition out of that draft: the others go on, and each client counts
and warns for its own service as `draftstore.remote.client` says.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.partitions import PartitionedDrafter
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.remote.addresses import Address
from draftstore.remote.client import BegunCall, RemoteDrafter, RemoteStore
from draftstore.remote.following import CHECK_SECONDS
from draftstore.trees.batch import Draft

WHOLE = "1/1"


class RemotePartitionsDrafter(PartitionedDrafter):
    """Drafts of a release in partitions with one strategy, a `ContextDrafter`; threads may share it."""

    def __init__(self, drafters: Sequence[RemoteDrafter]) -> None:
        """Draft from services; see `PartitionedDrafter`."""
        super().__init__(drafters)
        self._remote = tuple(drafters)

    def draft_each(self, contexts: NDArray[np.int32], budget: int) -> list[list[Draft]]:
        """Return what every partition drafts; all requests are sent before the first answer is awaited."""
        calls: list[BegunCall] = []
        drafts = []
        try:
            calls.extend(drafter.begin(contexts, budget) for drafter in self._remote)
            while calls:
                drafts.append(calls.pop(0).finish())
        finally:
            for call in calls:  # interrupted
                call.give_up()
        return drafts


class RemotePartitions:
    """A release or store in partitions, one on each of several lookup services.

    Attributes:
        name: its name, the same on all of them.
        partitions: clients of the services, in order.
    """

    projection = None
    """Partitions need no hidden states."""

    def __init__(self, addresses: Sequence[str | Path | Address], name: str, **settings: Any) -> None:
        """Prepare clients without connecting.

        Args:
            addresses: one for each partition.
            name: name of the release or store.
            settings: of all clients, see `RemoteStore`.

        Raises:
            DraftstoreError: invalid settings, no address, or one twice.
        """
        parsed = [Address.parse(address) for address in addresses]
        if not parsed or len(set(parsed)) < len(parsed):
            raise DraftstoreError(
                f"partitions at {', '.join(map(str, parsed)) or 'no address'}: expected one address for each, and none "
                "twice"
            )
        self.name = name
        self.partitions = tuple(RemoteStore(address, name, **settings) for address in parsed)

    def drafter(self, strategy: str = "") -> RemotePartitionsDrafter:
        """Return a drafter with a strategy of the stores; empty is their default.

        Raises:
            DraftstoreError: `check` has found different vocabularies, or dense stores.
        """
        return RemotePartitionsDrafter([store.drafter(strategy) for store in self.partitions])

    def check(self, strategy: str = "", seconds: float = CHECK_SECONDS) -> dict[str, Any]:
        """Check that every partition can be drafted from; meant for startup, since it waits.

        Returns:
            The first service's description of its store, see `RemoteStore.check`.

        Raises:
            LookupServiceError: a service is down or refuses, does not fit the model, or not the others.
        """
        found = [store.check(strategy, seconds) for store in self.partitions]
        for store, facts in zip(self.partitions, map(_facts, found), strict=True):
            if facts != _facts(found[0]):
                raise LookupServiceError(
                    f"{self.name!r} at {store.address} is a store of {facts}, at {self.partitions[0].address} of "
                    f"{_facts(found[0])}: partitions are stores of one kind, with one tokenizer"
                )
        require_all(found, self.name)
        return found[0]

    def close(self) -> None:
        """Close all connections; from now on every draft is empty."""
        for store in self.partitions:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def require_all(found: Sequence[dict[str, Any]], name: str) -> None:
    """Refuse parts of one store, `1/2` and `2/2`, of which one is missing, served twice, or beside a whole one.

    Args:
        found: what each service says of its store.
        name: name of the store.

    Raises:
        LookupServiceError: the parts are not those of a whole store.
    """
    parts = [str(release.get("partition") or WHOLE) for release in found]
    complete = [f"{number}/{len(parts)}" for number in range(1, len(parts) + 1)]
    if set(parts) != {WHOLE} and sorted(parts) != sorted(complete):
        raise LookupServiceError(
            f"of {name!r} the services have the parts {', '.join(parts)}: expected every part of one store once; each "
            "is served by a service of its own (`draftstore serve --partition`), and all their addresses are named"
        )


def _facts(release: dict[str, Any]) -> str:
    """Return in words what all partitions must have in common."""
    tokenizer = release.get("tokenizer")
    fingerprint = tokenizer.get("fingerprint") if isinstance(tokenizer, dict) else tokenizer
    return f"kind {release.get('kind')!r}, {release.get('vocab_size')} ids, tokenizer {str(fingerprint)[:16]}"


def addresses_of(lookup: str | None) -> list[str | None]:
    """Return the addresses of lookup services in a text with commas between them; None is the default service."""
    return [None] if lookup is None else [address.strip() for address in lookup.split(",")]


def open_release(lookup: str | None, name: str, **settings: Any) -> RemoteStore | RemotePartitions:
    """Return a client of a release: of one service, or of several that each serve a partition.

    Args:
        lookup: address, or several with commas between them; None: this user's service on this machine.
        name: name of the release or store.
        settings: see `RemoteStore`.

    Raises:
        DraftstoreError: invalid settings.
    """
    addresses = addresses_of(lookup)
    if len(addresses) == 1:
        return RemoteStore(addresses[0], name, **settings)
    return RemotePartitions([address or "" for address in addresses], name, **settings)

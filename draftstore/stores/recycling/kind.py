"""The kind `recycling`."""

from pathlib import Path
from typing import NoReturn

from draftstore.errors import StoreError
from draftstore.stores.kind import Kind
from draftstore.stores.recycling.store import KIND


class RecyclingKind(Kind):
    """A model's candidates, usable only in decoding with that model."""

    title = "Token Recycling"

    def open(self, path: Path, backend: str | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse to draft without a model."""
        raise StoreError(
            f"{path} is a store of kind {self.name!r}, which drafts only while its model decodes: use it with "
            "`draftstore generate --store` or `draftstore worker --store`"
        )


STORE_KIND = RecyclingKind(KIND)

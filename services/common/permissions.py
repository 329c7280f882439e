"""Permissions: which bearer token may use which releases. Only hashes of tokens are stored.

    [[token]]
    name = "engine-1"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    releases = ["chat-vicuna", "code"]      # or ["*"]
    appends = ["team"]                      # optional: live stores that it may append to; reading is `releases`
    max_budget = 1024                       # optional: maximum nodes per draft, instead of the service's limit

A token is 32 random bytes, out of reach of dictionary attacks, so a plain hash is enough. See `draftstore tokens`.
"""

import hashlib
import hmac
import json
import os
import secrets
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from draftstore.errors import DraftstoreError
from draftstore.options import sentence
from draftstore.storage.files import replacing
from draftstore.storage.locks import lock
from draftstore.trees.frontier import MAX_BUDGET

EVERY = "*"
"""Stands for every release."""
PREFIX = "draftstore_"
"""Prefix of every token, so that secret scanners can find it."""
_HEAD = "# Written by `draftstore tokens`, which preserves entries but not comments.\n"


class PermissionsError(DraftstoreError):
    """The token file cannot be used."""


Names: TypeAlias = frozenset[StrictStr]
"""Names of releases or live stores, or `EVERY`; a list in the file."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Grant:
    """The permissions of one token: an entry of the file. No token has the hash of `ANYBODY`."""

    name: Annotated[StrictStr, Field(min_length=1)]
    releases: Names
    sha256: Annotated[StrictStr, Field(pattern="^[0-9a-f]{64}$")]
    max_budget: Annotated[StrictInt | None, Field(ge=1, le=MAX_BUDGET)] = None
    appends: Names = frozenset()

    def allows(self, release: str) -> bool:
        """Return True if the token covers a release, whether or not that exists."""
        return release in self.releases or EVERY in self.releases

    def may_append(self, live: str) -> bool:
        """Return True if the token may append to a live store, whether or not that exists."""
        return live in self.appends or EVERY in self.appends


ANYBODY = Grant("anybody", frozenset([EVERY]), "0" * 64, appends=frozenset([EVERY]))


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: list[Grant] = []

    @field_validator("token")
    @classmethod
    def _differ(cls, entries: list[Grant]) -> list[Grant]:
        for what in ("name", "sha256"):
            if len({getattr(entry, what) for entry in entries}) < len(entries):
                raise ValueError(f"two entries have the same {what}: remove one of them")
        return entries


class Permissions:
    """All grants of a service; immutable, so that a changed file replaces all of them at once."""

    def __init__(self, grants: Iterable[Grant] | None) -> None:
        """Hold these grants; None allows everyone everything."""
        self.grants = None if grants is None else tuple(grants)

    @classmethod
    def load(cls, path: Path | None) -> "Permissions":
        """Read a token file; without one the service is open. PermissionsError if it cannot be read or is invalid."""
        return cls(read_grants(path) if path else None)

    @property
    def needs_token(self) -> bool:
        """Whether clients must present a token."""
        return self.grants is not None

    def identify(self, token: str | bytes | None) -> Grant | None:
        """Return the grant of a token; None if the token is unknown.

        Takes constant time, whatever the token: every hash is compared, each in constant time.
        """
        if self.grants is None:
            return ANYBODY
        if isinstance(token, str):
            token = token.encode(errors="surrogatepass")
        return self._find(hash_token(token or b""))

    def renew(self, grant: Grant) -> Grant | None:
        """Return the current grant for the token of an earlier grant; None if the token is gone."""
        if self.grants is None:
            return ANYBODY
        return None if grant is ANYBODY else self._find(grant.sha256)

    def _find(self, digest: str) -> Grant | None:
        found = None
        for grant in self.grants or ():
            if hmac.compare_digest(grant.sha256, digest):
                found = grant
        return found


def hash_token(token: str | bytes) -> str:
    """Return the SHA-256 of a token as hexadecimal digits."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).hexdigest()


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def read_grants(path: Path) -> list[Grant]:
    """Read the entries of a token file; PermissionsError if it cannot be used, or others may write to it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            document = tomllib.load(file)
    except FileNotFoundError:
        raise PermissionsError(
            f"there is no token file {path}: create it with "
            f"`draftstore tokens new NAME --release RELEASE --file {path}`"
        ) from None
    except OSError as error:
        raise PermissionsError(f"the token file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise PermissionsError(f"the token file {path} is not TOML: {error}") from None
    if mode & 0o022:
        raise PermissionsError(
            f"others may write to the token file {path} (mode {mode & 0o777:o}) and grant themselves access: "
            f"run `chmod go-w {path}`"
        )
    try:
        return _File.model_validate(document).token
    except ValidationError as error:
        raise PermissionsError(f"the token file {path} is invalid: {sentence(error, values=False)}") from None


def change_grants(path: Path, change: Callable[[list[Grant]], list[Grant]]) -> None:
    """Read the entries of a token file, change them and write them back; one process at a time.

    A new file is readable by its owner alone. PermissionsError if the file or its folder cannot be used.
    """
    try:
        held = lock(path.parent)
    except OSError as error:
        raise PermissionsError(f"the folder {path.parent} cannot be used: {error.strerror}") from None
    try:
        with held:
            grants = read_grants(path) if path.exists() else []
            _replace(path, _to_toml(change(grants)).encode())
    except OSError as error:
        raise PermissionsError(f"the token file {path} cannot be written: {error.strerror}") from None


def _replace(path: Path, data: bytes) -> None:
    path = path.resolve()  # a symbolic link stays one
    with replacing(path, 0o600) as temporary:
        with suppress(FileNotFoundError, PermissionError):
            before = path.stat()
            os.chown(temporary, before.st_uid, before.st_gid)
            temporary.chmod(before.st_mode & 0o777)
        temporary.write_bytes(data)


def _to_toml(grants: list[Grant]) -> str:
    entries = (
        f"\n[[token]]\nname = {_quoted(grant.name)}\nsha256 = {_quoted(grant.sha256)}\n"
        f"releases = [{', '.join(map(_quoted, sorted(grant.releases)))}]\n"
        + (f"appends = [{', '.join(map(_quoted, sorted(grant.appends)))}]\n" if grant.appends else "")
        + (f"max_budget = {grant.max_budget}\n" if grant.max_budget is not None else "")
        for grant in grants
    )
    return _HEAD + "".join(entries)


def _quoted(text: str) -> str:
    """Return a TOML string: as in JSON, except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

"""Permissions: which bearer token may ask for which releases. Only hashes of tokens are stored.

    [[token]]
    name = "engine-1"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    releases = ["chat-vicuna", "code"]      # or ["*"]
    max_budget = 1024                       # optional: most nodes of a draft, in place of the service's own limit

A token is 32 random bytes, out of reach of dictionary attacks, so a plain hash is enough. See `draftstore tokens`.
"""

import dataclasses
import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftstore.errors import DraftstoreError, type_name
from draftstore.trees.frontier import MAX_BUDGET

EVERY = "*"
"""Stands for every release."""
PREFIX = "draftstore_"
"""Prefix of every token, so that secret scanners can find it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class PermissionsError(DraftstoreError):
    """The token file cannot be used."""


@dataclasses.dataclass(frozen=True)
class Grant:
    """The permissions of one token.

    Attributes:
        name: name of the token, for logs and messages.
        releases: names, or `EVERY`.
        digest: SHA-256 of the token; empty where no token is needed.
        max_budget: maximum nodes of a draft; None: that of the service.
    """

    name: str
    releases: frozenset[str]
    digest: str = ""
    max_budget: int | None = None

    def allows(self, release: str) -> bool:
        """Return True if the token covers a release, whether or not that exists."""
        return release in self.releases or EVERY in self.releases


ANYBODY = Grant("anybody", frozenset([EVERY]))


class Permissions:
    """All grants of a service; immutable, so that a changed file replaces all of them at once."""

    def __init__(self, grants: Iterable[Grant] | None) -> None:
        """Hold these grants; None allows everything to everybody."""
        self.grants = None if grants is None else tuple(grants)

    @classmethod
    def open_to_all(cls) -> "Permissions":
        """Return the permissions of a service without tokens."""
        return cls(None)

    @classmethod
    def load(cls, path: Path) -> "Permissions":
        """Read a token file.

        Raises:
            PermissionsError: the file cannot be read or is invalid.
        """
        return cls(read_grants(path))

    @property
    def needs_token(self) -> bool:
        """Whether clients must present a token."""
        return self.grants is not None

    def including(self, grant: Grant) -> "Permissions":
        """Return these permissions and one more grant, such as that of the service's own HTTP process."""
        return Permissions(None if self.grants is None else (*self.grants, grant))

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
        """Return the present grant of the token behind an earlier one; None if the token is gone."""
        return ANYBODY if self.grants is None else self._find(grant.digest)

    def _find(self, digest: str) -> Grant | None:
        found = None
        for grant in self.grants or ():
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found


def hash_token(token: str | bytes) -> str:
    """Return the SHA-256 of a token as hexadecimal digits."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).hexdigest()


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def read_grants(path: Path) -> list[Grant]:
    """Read the entries of a token file.

    Raises:
        PermissionsError: the file cannot be read, is not TOML, or has an invalid entry.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PermissionsError(
            f"there is no file of tokens {path}: make one with "
            f"`draftstore tokens new NAME --release RELEASE --file {path}`"
        ) from None
    except OSError as error:
        raise PermissionsError(f"the file of tokens {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise PermissionsError(f"the file of tokens {path} is not TOML: {error}") from None
    unknown = document.keys() - {"token"}
    entries = document.get("token", [])
    if unknown or not isinstance(entries, list):
        raise PermissionsError(
            f"the file of tokens {path} holds {sorted(document)}, expected only tables [[token]]"
        )
    grants = [_read_grant(path, number, entry) for number, entry in enumerate(entries, 1)]
    _check_unique(path, grants)
    return grants


def _read_grant(path: Path, number: int, entry: Any) -> Grant:
    """Read one entry."""
    where = f"token {number} of {path}"
    if not isinstance(entry, dict) or entry.keys() - {"max_budget"} != {"name", "sha256", "releases"}:
        found = sorted(entry) if isinstance(entry, dict) else type_name(entry)
        raise PermissionsError(
            f"{where} holds {found}, expected name, sha256, releases and perhaps max_budget"
        )
    name, digest, releases = entry["name"], entry["sha256"], entry["releases"]
    if not isinstance(name, str) or not name:
        raise PermissionsError(f"{where} has the name {name!r}, expected some text")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise PermissionsError(
            f"{where} has no SHA-256: expected 64 of the digits 0-9 and a-f"
        )  # without the value: it may be a token
    if not isinstance(releases, list) or not all(isinstance(release, str) for release in releases):
        raise PermissionsError(f"{where} may use {releases!r}, expected a list of names of releases")
    budget = entry.get("max_budget")
    if budget is not None and (type(budget) is not int or not 1 <= budget <= MAX_BUDGET):
        raise PermissionsError(
            f"{where} has max_budget {budget!r}, expected a number from 1 to {MAX_BUDGET:,}"
        )
    return Grant(name, frozenset(releases), digest, budget)


def _check_unique(path: Path, grants: list[Grant]) -> None:
    """Refuse two entries with the same name or the same token."""
    for what, values in (
        ("name", [grant.name for grant in grants]),
        ("token", [grant.digest for grant in grants]),
    ):
        if len(set(values)) < len(values):
            raise PermissionsError(f"two entries of {path} have the same {what}: remove one of them")

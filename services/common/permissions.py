"""Who may ask for drafts of which release: bearer tokens, of which only hashes are kept.

    [[token]]
    name = "engine-1"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    releases = ["chat-vicuna", "code"]      # or ["*"]

A token is 32 random bytes: no dictionary holds it, so a plain hash is enough. See `draftstore tokens`.
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

EVERY = "*"
"""Stands for every release."""
PREFIX = "draftstore_"
"""Of every token, so that programs that look for secrets in the wrong place find it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class PermissionsError(DraftstoreError):
    """The file of tokens cannot be used."""


@dataclasses.dataclass(frozen=True)
class Grant:
    """What the bearer of one token may ask for.

    Attributes:
        name: of the token, for logs and for people.
        releases: names, or `EVERY`.
        digest: SHA-256 of the token; empty where no token is needed.
    """

    name: str
    releases: frozenset[str]
    digest: str = ""

    def allows(self, release: str) -> bool:
        """Tell whether a release may be asked for; it need not exist."""
        return release in self.releases or EVERY in self.releases


ANYBODY = Grant("anybody", frozenset([EVERY]))


class Permissions:
    """All grants of a service; immutable, so that a changed file takes the place of all of them at once."""

    def __init__(self, grants: Iterable[Grant] | None) -> None:
        """Know these grants; with None everybody may ask for everything."""
        self.grants = None if grants is None else tuple(grants)

    @classmethod
    def open_to_all(cls) -> "Permissions":
        """Return the permissions of a service that asks nobody for a token."""
        return cls(None)

    @classmethod
    def load(cls, path: Path) -> "Permissions":
        """Read a file of tokens.

        Raises:
            PermissionsError: it cannot be read, or is no such file.
        """
        return cls(read_grants(path))

    @property
    def needs_token(self) -> bool:
        """Whether a client has to say who it is."""
        return self.grants is not None

    def including(self, grant: Grant) -> "Permissions":
        """Return these permissions and one more, such as that of the service's own HTTP side."""
        return Permissions(None if self.grants is None else (*self.grants, grant))

    def identify(self, token: str | bytes | None) -> Grant | None:
        """Return what the bearer of a token may do; None if no token is known by it.

        The time this takes tells nothing about the tokens: all hashes are compared, each in constant time.
        """
        if self.grants is None:
            return ANYBODY
        if isinstance(token, str):
            token = token.encode(errors="surrogatepass")
        return self._find(hash_token(token or b""))

    def renew(self, grant: Grant) -> Grant | None:
        """Return what the bearer of an earlier grant may do now; None if the token is gone."""
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
    """Return a token that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def read_grants(path: Path) -> list[Grant]:
    """Read the entries of a file of tokens.

    Raises:
        PermissionsError: it cannot be read, is no TOML, or an entry is not as it should be.
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
    except ValueError as error:  # no UTF-8, no TOML
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
    """Read one entry.

    Raises:
        PermissionsError: a key is missing, unknown or of another type.
    """
    where = f"token {number} of {path}"
    if not isinstance(entry, dict) or entry.keys() != {"name", "sha256", "releases"}:
        found = sorted(entry) if isinstance(entry, dict) else type_name(entry)
        raise PermissionsError(f"{where} holds {found}, expected name, sha256 and releases")
    name, digest, releases = entry["name"], entry["sha256"], entry["releases"]
    if not isinstance(name, str) or not name:
        raise PermissionsError(f"{where} has the name {name!r}, expected some text")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise PermissionsError(
            f"{where} has no SHA-256: expected 64 of the digits 0-9 and a-f"
        )  # do not print it
    if not isinstance(releases, list) or not all(isinstance(release, str) for release in releases):
        raise PermissionsError(f"{where} may use {releases!r}, expected a list of names of releases")
    return Grant(name, frozenset(releases), digest)


def _check_unique(path: Path, grants: list[Grant]) -> None:
    """Refuse two entries of one name, which nobody could tell apart, or of one token.

    Raises:
        PermissionsError: there are such entries.
    """
    for what, values in (
        ("name", [grant.name for grant in grants]),
        ("token", [grant.digest for grant in grants]),
    ):
        if len(set(values)) < len(values):
            raise PermissionsError(f"two entries of {path} have the same {what}: remove one of them")

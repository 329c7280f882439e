import hashlib
import json
import os
import re
import shlex
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import DraftstoreError
from services.cli.tokens import tokens
from services.common.permissions import (
    ANYBODY,
    EVERY,
    Grant,
    Permissions,
    PermissionsError,
    _to_toml,
    change_grants,
    hash_token,
    read_grants,
)
from tests import ROOT

PAGE = ROOT / "services" / "lookup" / "page" / "index.html"
ONE = Grant("one", frozenset(["chat", "code"]), hash_token("secret-1"))
ALL = Grant("all", frozenset([EVERY]), hash_token("secret-2"))


def entry(name: str = "a", sha256: str = "0" * 64, releases: str = '["x"]') -> str:
    return f'[[token]]\nname = "{name}"\nsha256 = "{sha256}"\nreleases = {releases}\n'


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(tokens, [str(argument) for argument in arguments])


def new(path: Path, name: str, *releases: str) -> str:
    """Make a token by the command and return it."""
    options = [part for release in releases for part in ("--release", release)]
    result = invoke("new", name, *options, "--file", path)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_the_page_names_a_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall(r"<code>draftstore tokens (new [^<]+)</code>", PAGE.read_text(encoding="utf-8"))
    ran = CliRunner().invoke(tokens, shlex.split(words))
    assert ran.exit_code == 0, ran.output
    assert [grant.name for grant in read_grants(Path("TOKENS.toml"))] == ["NAME"]


def test_a_token_identifies_its_bearer() -> None:
    permissions = Permissions([ONE, ALL])
    assert permissions.identify("secret-1") == permissions.identify(b"secret-1") == ONE
    assert permissions.identify("secret-2") == ALL
    for token in (None, "", b"", "secret", "secret-1 ", "\ud800", b"\xff\0", ONE.sha256):
        assert permissions.identify(token) is None


def test_a_grant_allows_its_releases() -> None:
    assert ONE.allows("chat")
    assert ONE.allows("code")
    assert not ONE.allows("chat2")
    assert not ONE.allows("")
    assert not ONE.allows(EVERY)
    assert ALL.allows("anything")


def test_no_token_file_allows_all_an_empty_one_none() -> None:
    assert not Permissions(None).needs_token
    assert Permissions([]).needs_token
    for token in (None, "", "whatever"):
        assert Permissions(None).identify(token) == ANYBODY
        assert Permissions([]).identify(token) is None
    assert ANYBODY.allows("chat")


def test_grants_are_renewed_by_token_not_by_name() -> None:
    changed = Grant("renamed", frozenset(["rest"]), ONE.sha256)
    taken_over = Grant("one", frozenset([EVERY]), hash_token("another"))
    assert Permissions([changed]).renew(ONE) == changed
    assert Permissions([taken_over]).renew(ONE) is None
    assert Permissions([ONE]).renew(ANYBODY) is None
    assert Permissions(None).renew(ONE) == ANYBODY


def test_the_file_in_the_documentation_is_read(tmp_path: Path) -> None:
    import services.common.permissions as module

    assert module.__doc__
    path = tmp_path / "tokens.toml"
    path.write_text(module.__doc__.partition("\n\n")[2].rpartition("\n\n")[0])
    [grant] = read_grants(path)
    assert grant == Grant(
        "engine-1", frozenset(["chat-vicuna", "code"]), hash_token("test"), 1024, frozenset(["team"])
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[token]\n", "is not TOML"),
        ("\udcff", "is not TOML"),
        ("tokens = []\n", "tokens: unknown field"),
        (entry() + "extra = 1\n", "token.0.extra: unknown field"),
        (entry(name=""), "token.0.name: String should have at least"),
        (entry(sha256="secret"), "token.0.sha256: String should match"),
        (entry(sha256="0" * 65), "token.0.sha256: String should match"),
        (entry() + "max_budget = 0\n", "max_budget"),
        (entry() + "max_budget = 4097\n", "max_budget"),
        (entry() + "max_budget = true\n", "max_budget"),
        (entry() + entry(sha256="1" * 64), "same name"),
        (entry() + entry(name="b"), "same sha256"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(PermissionsError, match=words) as caught:
        Permissions.load(path)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)  # a token in the wrong place is not shown


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PermissionsError, match="draftstore tokens new"):
        Permissions.load(tmp_path / "none.toml")
    with pytest.raises(PermissionsError, match="cannot be read"):
        Permissions.load(tmp_path)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tokens.toml"
    new(path, "a", "x")
    path.chmod(mode)
    with pytest.raises(PermissionsError, match=f"others may write .*mode {mode:o}.*chmod go-w {path}"):
        Permissions.load(path)
    path.chmod(0o755)
    assert Permissions.load(path).needs_token


@given(name=st.text(min_size=1), releases=st.lists(st.text(), max_size=3))
def test_any_text_comes_back_from_the_file(name: str, releases: list[str]) -> None:
    grant = Grant(name, frozenset(releases), "0" * 64)
    try:
        text = _to_toml([grant]).encode().decode()
    except UnicodeEncodeError:
        return  # half a surrogate pair, which no file can hold
    [found] = tomllib.loads(text)["token"]
    assert (found["name"], set(found["releases"])) == (name, set(releases))


def test_the_command_makes_lists_and_removes_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    one, two = new(path, "engine-1", "chat", "code"), new(path, "page", EVERY)
    live = json.loads(
        invoke("new", "live", "--release", "a", "--append", "a", "--file", path, "--json").output
    )
    found = Permissions.load(path).identify(live["token"])
    assert found
    assert [found.may_append(name) for name in ("a", "b")] == [True, False]
    assert invoke("remove", "live", "--file", path).exit_code == 0
    assert one not in path.read_text()
    permissions = Permissions.load(path)
    grant = permissions.identify(one)
    assert grant == Grant("engine-1", frozenset(["chat", "code"]), hashlib.sha256(one.encode()).hexdigest())
    assert permissions.identify(two) == Grant("page", frozenset([EVERY]), hash_token(two))
    assert json.loads(invoke("list", "--file", path, "--json").output) == [
        {"name": "engine-1", "releases": ["chat", "code"], "appends": [], "max_budget": None},
        {"name": "page", "releases": ["*"], "appends": [], "max_budget": None},
    ]
    assert invoke("remove", "engine-1", "--file", path).exit_code == 0
    assert Permissions.load(path).identify(one) is None
    assert Permissions.load(path).identify(two)
    assert invoke("remove", "page", "--file", path).exit_code == 0
    assert "every request is refused" in invoke("list", "--file", path).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("new", "taken", "--release", "x"), "already has a token 'taken'"),
        (("new", " ", "--release", "x"), "cannot be the name"),
        (("new", "a\nb", "--release", "x"), "cannot be the name"),
        (("new", "a", "--release", ""), "is empty"),
        (("remove", "unknown"), "no token 'unknown': it has taken"),
    ],
)
def test_the_command_refuses(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    path = tmp_path / "tokens.toml"
    new(path, "taken", "x")
    before = path.read_bytes()
    result = invoke(*arguments, "--file", path)
    assert isinstance(result.exception, DraftstoreError)
    assert words in str(result.exception)
    assert path.read_bytes() == before


def test_the_file_is_private_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    umask = os.umask(0)
    try:
        new(path, "a", "x")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    new(link, "b", "x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert {grant.name for grant in read_grants(path)} == {"a", "b"}
    assert sorted(tmp_path.iterdir()) == [link, path]


def add_ten(path: Path, first: int) -> None:
    for number in range(first, first + 10):
        grant = Grant(f"t{number}", frozenset(["x"]), hash_token(str(number)))
        change_grants(path, lambda grants, grant=grant: [*grants, grant])  # type: ignore[misc]


def test_changes_of_the_file_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(add_ten, [path] * 3, [0, 10, 20]))
    assert {grant.name for grant in read_grants(path)} == {f"t{number}" for number in range(30)}
    assert list(tmp_path.iterdir()) == [path]

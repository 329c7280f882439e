"""Forty small faults in the core, each of which the tests of its room must catch: `make test-mutants`.

A seeded draw over rooms chooses comparisons, constants and calls; each is changed in a copy of the checkout, where the
tests of the room, and then those of the rooms that import it, run until one fails. `--seed` draws others.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = {
    "draftstore/search": "search",
    "draftstore/trees": "trees",
    "draftstore/decoding": "decoding",
    "draftstore/storage": "storage",
    "draftstore/remote": "remote",
    "services/common/permissions.py": "common",
}
SECONDS = 300
SIGNS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
}
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}


class Mutant(NamedTuple):
    """One changed place of a module; `line` counts from 1, columns are bytes."""

    path: Path
    line: int
    begin: int
    end: int
    text: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every place of the functions of a module that can be changed."""
    source = path.read_bytes().splitlines()
    tree = ast.parse(path.read_text())
    messages = {
        inner for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {inner for function in functions for line in function.body for inner in ast.walk(line)}
    for node in (node for node in ast.walk(tree) if node in inside - messages):
        if (
            not isinstance(node, ast.expr | ast.stmt)
            or node.end_lineno != node.lineno
            or node.end_col_offset is None
        ):
            continue
        line = node.lineno
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SIGNS:
            sign = SIGNS[type(node.ops[0])]
            at = source[line - 1].find(f" {sign} ".encode(), node.left.end_col_offset)
            if at >= 0:
                yield Mutant(path, line, at + 1, at + 1 + len(sign), SWAPPED[sign])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            changed = str(not node.value) if isinstance(node.value, bool) else f"({ast.unparse(node)} + 1)"
            yield Mutant(path, line, node.col_offset, node.end_col_offset, changed)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutant(path, line, node.col_offset, node.end_col_offset, "pass")


def drawn(seed: int, count: int) -> list[Mutant]:
    """Return mutants of all rooms in equal shares as far as they have places, no two of one line."""
    chance = random.Random(seed)
    found: list[Mutant] = []
    for number, room in enumerate(reversed(ROOMS)):  # small ones first: the others have more places
        paths = sorted((ROOT / room).glob("*.py")) or [ROOT / room]
        lines = {(mutant.path, mutant.line): mutant for path in paths for mutant in _shuffled(path, chance)}
        share = (count - len(found)) // (len(ROOMS) - number)
        found += chance.sample(list(lines.values()), min(share, len(lines)))
    return found


def _shuffled(path: Path, chance: random.Random) -> list[Mutant]:
    mutants = list(mutants_of(path))
    chance.shuffle(mutants)
    return mutants


def tests_of(room: str) -> list[str]:
    """Return the folders of the tests of a room, and after it of the rooms that import it."""
    module = room.removesuffix(".py").replace("/", ".")
    importing = {
        path.relative_to(ROOT).parts[1]
        for package in ("draftstore", "services", "schema")
        for path in (ROOT / package).rglob("*.py")
        if f"from {module}" in path.read_text()
    }
    folders = [ROOMS[room], *sorted(importing - {ROOMS[room]})]
    return [f"tests/unit/{folder}" for folder in folders if (ROOT / "tests/unit" / folder).is_dir()]


def run(copy: Path, mutant: Mutant, folders: list[str]) -> tuple[str, float]:
    """Return what the tests say of a mutant (caught, timeout, survived), and the seconds that took."""
    path = copy / mutant.path.relative_to(ROOT)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    lines[mutant.line - 1] = line[: mutant.begin] + mutant.text.encode() + line[mutant.end :]
    path.write_bytes(b"".join(lines))
    begun = time.monotonic()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-n", "2", "--dist", "loadfile"]
    try:
        for folder in folders:
            left = SECONDS - (time.monotonic() - begun)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, folder],
                cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, timeout=max(left, 1),
            )  # fmt: skip
            if done.returncode:
                return "caught", time.monotonic() - begun
    except subprocess.TimeoutExpired:
        return "timeout", time.monotonic() - begun
    finally:
        path.write_bytes(whole)
    return "survived", time.monotonic() - begun


def main() -> int:
    """Draw, run, and print a line a mutant; the status is 1 where more than a tenth survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    given = parser.parse_args()
    copy = Path(os.environ.get("TMPDIR", "/tmp")) / f"draftstore-mutants-{os.getpid()}"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "data", "build", "dist"))
    survivors = 0
    try:
        for mutant in drawn(given.seed, given.count):
            room = next(room for room in ROOMS if str(mutant.path.relative_to(ROOT)).startswith(room))
            said, seconds = run(copy, mutant, tests_of(room))
            survivors += said != "caught"
            old = mutant.path.read_text().splitlines()[mutant.line - 1].strip()
            place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
            print(f"{said:9} {seconds:4.0f} s  {place}:{mutant.begin} -> {mutant.text}    {old}", flush=True)
    finally:
        shutil.rmtree(copy)
    print(f"{given.count - survivors} of {given.count} caught")
    return int(survivors > given.count / 10)


if __name__ == "__main__":
    sys.exit(main())

"""The two wheels: draftstore alone, as in an inference engine, and together with draftstore-server."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.fakes.servers import reachable_folder

pytestmark = pytest.mark.slow
PROJECTS = {"draftstore": ROOT, "draftstore_server": ROOT / "packaging" / "server"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both, with the tools that are installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run([*command, *map(str, PROJECTS.values())], check=True, capture_output=True)
    return {name: next(folder.glob(f"{name}-*.whl")) for name in PROJECTS}


def environment(folder: Path, *wheels: Path) -> Path:
    """Make an environment with wheels and the libraries of this one, and return its programs."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        *map(str, wheels),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    (path,) = folder.glob("lib/*/site-packages")
    # As a path alone: the editable install of the checkout that lies there does not take effect.
    (path / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def run(programs: Path, home: Path, *arguments: str) -> str:
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DRAFTSTORE"))
    }
    variables["DRAFTSTORE_HOME"] = str(home)
    done = subprocess.run(
        [str(programs / arguments[0]), *arguments[1:]],
        cwd="/",
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_gets_one_package(wheels: dict[str, Path], tmp_path: Path) -> None:
    programs = environment(tmp_path, wheels["draftstore"])
    listed = run(programs, tmp_path / "home", "draftstore", "--help")
    assert "  query " in listed
    assert not any(f"  {name} " in listed for name in ("serve", "worker", "sql", "db", "catalogue"))
    code = "import draftstore.remote.client, importlib.util as u; print(u.find_spec('schema'), draftstore.__file__)"
    printed = run(programs, tmp_path / "home", "python", "-c", code)
    assert printed.startswith(f"None {tmp_path}")


def test_the_second_wheel_brings_catalogue_flows_and_services(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    programs = environment(tmp_path, *wheels.values())
    with reachable_folder() as home:
        assert "at revision" in run(programs, home, "draftstore", "db", "migrate")
        assert (
            run(programs, home, "draftstore", "sql", "--csv", "SELECT count(*) FROM builds") == "count\n0\n"
        )
        for name in ("serve", "worker", "tokens", "catalogue", "corpus", "doctor", "releases", "recordings"):
            assert f"draftstore {name}" in run(programs, home, "draftstore", name, "--help")
        assert "--port" in run(programs, home, "python", "-m", "pipelines.serving", "--help")
        code = "from pipelines import deployments; print(deployments.__file__)"
        assert run(programs, home, "python", "-c", code).startswith(f"{tmp_path}")


def test_the_wheels_belong_together() -> None:
    first, second = (tomllib.loads((path / "pyproject.toml").read_text()) for path in PROJECTS.values())
    version = first["project"]["version"]
    assert second["project"]["version"] == version
    extras: dict[str, Any] = second["project"]["optional-dependencies"]
    for needed in (
        *second["project"]["dependencies"],
        *(line for lines in extras.values() for line in lines),
    ):
        name, _, wanted = needed.partition("==")
        assert wanted == version
        assert name.removeprefix("draftstore[").removesuffix("]") in first["project"]["optional-dependencies"]
    included = second["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    modules = {
        entry["value"] if isinstance(entry, dict) else entry
        for entry in first["project"]["entry-points"]["draftstore.commands"].values()
    }
    assert {value.partition(".")[0] for value in modules} <= set(included.values())

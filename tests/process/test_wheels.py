"""The two wheels: draftstore alone, as in an inference engine, and together with draftstore-server."""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import venv
from functools import partial
from pathlib import Path

import pytest

from tests import ROOT
from tests.fakes.servers import free_port, reachable_folder
from tests.journey.pages import read_page

pytestmark = pytest.mark.slow
PROJECTS = {"draftstore": ROOT, "draftstore_server": ROOT / "packaging" / "server"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both as a user does, with the tools that are installed here."""
    folder = tmp_path_factory.mktemp("made") / "dist"
    given = [f"BIN={Path(sys.executable).parent}", f"DIST={folder}", "ARGS=--no-build-isolation"]
    subprocess.run(["make", "wheels", *given], cwd=ROOT, check=True, capture_output=True)
    assert len(list(folder.iterdir())) == len(PROJECTS)
    return {name: next(folder.glob(f"{name}-*.whl")) for name in PROJECTS}


def environment(folder: Path, *wheels: Path) -> Path:
    """Make an environment with wheels and the libraries of this one, and return its programs."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *map(str, wheels)], check=True, capture_output=True)
    (path,) = folder.glob("lib/*/site-packages")
    # As a path alone: the editable install of the checkout that lies there does not take effect.
    (path / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def variables(home: Path) -> dict[str, str]:
    """Return the environment of somebody who never used draftstore."""
    others = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DRAFTSTORE"))
    }
    return others | {"DRAFTSTORE_HOME": str(home), "DRAFTSTORE_SOCKET": str(home / "lookup.sock")}


def run(programs: Path, home: Path, *arguments: str, folder: str | Path = "/") -> str:
    command = [str(programs / arguments[0]), *arguments[1:]]
    done = subprocess.run(
        command, cwd=folder, env=variables(home), capture_output=True, text=True, check=False
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
        for name in ("serve", "worker", "tokens", "catalogue", "corpus", "releases", "recordings"):
            assert f"draftstore {name}" in run(programs, home, "draftstore", name, "--help")
        assert "--port" in run(programs, home, "python", "-m", "pipelines.serving", "--help")
        code = "from pipelines import deployments; print(deployments.__file__)"
        assert run(programs, home, "python", "-c", code).startswith(f"{tmp_path}")


def test_the_readme_works_with_the_wheels_alone(
    wheels: dict[str, Path],
) -> None:
    """From an empty environment on: this downloads what a user downloads."""
    page = read_page("README.md")
    with tempfile.TemporaryDirectory() as name:  # 2 GB, which nobody needs afterwards
        folder = Path(name)
        venv.create(folder / "environment", with_pip=True)
        programs = folder / "environment" / "bin"
        step = partial(run, programs, folder, folder=folder)
        built = [f"{wheels['draftstore']}[quickstart,hf]", str(wheels["draftstore_server"])]
        step("pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *built)
        step("draftstore", "quickstart", "--out", "data/quickstart", "--source", str(ROOT / "services"))
        model = "from draftstore.cli.demo import fetch_smollm; fetch_smollm(Path('data/model'))"
        step("python", "-c", f"from pathlib import Path; {model}")
        for line in page.commands:
            if not line.endswith("&"):
                assert step("draftstore", *shlex.split(line))
        (serve,) = page.services
        address = f"127.0.0.1:{free_port()}"
        command = [str(programs / "draftstore"), *shlex.split(serve), "--http", address]
        with subprocess.Popen(command, cwd=folder, env=variables(folder)) as service:
            try:
                for request in page.requests:
                    asked = request.replace("127.0.0.1:7780", address).replace("--retry 60", "--retry 600")
                    words = shlex.split(asked)  # on a busy machine, compiling all kernels takes minutes
                    subprocess.run([*words, "--fail", "--silent"], check=True, capture_output=True)
                for block in page.blocks:
                    step("python", "-c", block)
            finally:
                service.terminate()
        assert service.returncode == 0

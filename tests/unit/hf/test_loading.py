"""Models from directories and GGUF files, the tokenizer that stores are checked against, and errors in one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftstore.errors import ModelError, TokenizerError
from draftstore.hf import load_model
from draftstore.hf.loading import text_tokenizer
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.fakes.hf_models import build_image_text, tiny


@pytest.fixture(scope="session")
def model_folder(small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a small random model with the small tokenizer; a few ids pad its matrices."""
    folder = tmp_path_factory.mktemp("models") / "small-model"
    model: Any = tiny(vocab_size=small_tokenizer.vocab_size + 3, dtype=torch.float16, eos_token_id=1)
    model.save_pretrained(folder)
    small_tokenizer.save(folder)
    return folder


def test_a_directory_gives_model_and_tokenizer(model_folder: Path, small_tokenizer: TextTokenizer) -> None:
    loaded = load_model(model_folder)
    model, tokenizer, text = loaded
    assert (loaded.name, loaded.vocab_size) == ("small-model", small_tokenizer.vocab_size + 3)
    assert text.identity.fingerprint == small_tokenizer.fingerprint
    assert tokenizer.encode("hi", add_special_tokens=False) == text.encode("hi", bos=False).tolist()
    assert not model.training


def test_dtype_device_and_attention_are_respected(model_folder: Path) -> None:
    for dtype in ("float64", torch.float64):
        model = load_model(str(model_folder), dtype=dtype, device="cpu", attention="eager").model
        assert (model.dtype, model.config._attn_implementation) == (torch.float64, "eager")
    assert load_model(model_folder, dtype="auto", device="cpu").model.dtype == torch.float16


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_only_models_are_loaded(tmp_path: Path, model_folder: Path) -> None:
    write(tmp_path / "empty" / "notes.txt", "")
    write(tmp_path / "broken" / "config.json", "{")
    write(tmp_path / "encoder" / "config.json", json.dumps({"model_type": "t5"}))
    write(tmp_path / "two" / "a.gguf", "")
    write(tmp_path / "two" / "b.gguf", "")
    for name, said in (
        ("none", "no model at"),
        ("empty", "holds no config.json: pass a directory"),
        ("empty/notes.txt", "is a file, but not a .gguf file"),
        ("broken", "cannot load the model"),
        ("encoder", "cannot load the model"),
        ("two", "2 .gguf files: name one of them"),
        ("two/a.gguf", "cannot load the model"),
    ):
        with pytest.raises(ModelError, match=said):
            load_model(tmp_path / name)
    for name in ("", "a b", "a/b/c", "~/x"):
        with pytest.raises(ModelError, match=r"no model at|holds no config"):
            load_model(name)
    for options, said in (
        ({"dtype": "int3"}, "no weights of type 'int3': expected one of auto, float32"),
        ({"device": "abacus"}, "cannot load the model"),
        ({"attention": "none-such"}, "cannot load the model"),
    ):
        with pytest.raises(ModelError, match=said):
            load_model(model_folder, **options)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    model: Any = tiny()
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises((ModelError, TokenizerError), match="tokenizer"):
        load_model(tmp_path / "bare")


def test_a_tokenizer_that_transformers_made_is_known_by_its_content(
    tmp_path: Path, model_folder: Path, small_tokenizer: TextTokenizer
) -> None:
    tokenizer: Any = load_model(model_folder).tokenizer
    tokenizer.chat_template = "{{ messages[0].content }}!"
    text = text_tokenizer(tokenizer, None, "from-gguf")
    assert text.identity.name == "from-gguf"
    assert text.fingerprint == small_tokenizer.fingerprint
    assert text.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True) == "hi!"
    text.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == small_tokenizer.fingerprint
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        text_tokenizer(object(), None, "slow")  # type: ignore[arg-type]


def write_gguf(path: Path, tokenizer: TextTokenizer) -> None:
    """Write a random model of one layer as GGUF."""
    gguf = pytest.importorskip("gguf")
    state = json.loads(tokenizer._backend.to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    settings = {
        "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 16, "head_count": 2,
        "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 4, "vocab_size": len(state["vocab"]),
        "tokenizer_model": "gpt2", "token_list": sorted(state["vocab"], key=state["vocab"].get),
        "token_merges": [" ".join(merge) for merge in state["merges"]], "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8)}
    shapes |= {"ffn_gate": (16, 8), "ffn_up": (16, 8), "ffn_down": (8, 16)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.normal(size=shape).astype(np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(8, np.float32))
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", rng.normal(size=(len(state["vocab"]), 8)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_model_and_tokenizer(
    tmp_path: Path, small_tokenizer: TextTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", small_tokenizer)
    for place in (tmp_path / "tiny.gguf", tmp_path):  # it is the only one there
        loaded = load_model(place, device="cpu")
        assert loaded.name == (place.stem if place.is_file() else place.name)
        assert loaded.vocab_size == small_tokenizer.vocab_size
        assert loaded.model.dtype == torch.float32
        ids = loaded.text.encode("The quick brown fox", bos=False)
        assert ids.tolist() == small_tokenizer.encode("The quick brown fox", bos=False).tolist()
        assert loaded.text.eos_id == 1
        assert load_tokenizer(place).identity == loaded.text.identity  # stores are built with it
        logits = loaded.model(torch.from_numpy(ids.astype(np.int64))[None]).logits
        assert torch.isfinite(logits).all()
    assert capfd.readouterr() == ("", "")


def test_a_model_that_can_also_read_images(data: Path, tmp_path: Path) -> None:
    """Most such families are no causal language models to transformers."""
    model: Any = build_image_text("llava", vocab_size=512)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / "models" / "stories260K" / name, tmp_path)
    loaded = load_model(tmp_path, device="cpu")
    assert type(loaded.model) is type(model)
    assert loaded.vocab_size == 512

import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.conversation import encode_conversation
from draftstore.errors import TokenizerError
from draftstore.text.chat import DOCUMENT_DATE
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer

ALPHABET = st.characters(exclude_categories=["Cs"])
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def edit(tokenizer: TextTokenizer, folder: Path, config: dict[str, Any], template: str | None = None) -> Path:
    """Save a tokenizer with another configuration and chat template."""
    folder.mkdir()
    tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def edit_json(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes, indent=4), encoding="utf-8")


@given(text=st.text(ALPHABET, max_size=60))
def test_decode_gives_back_the_text(small_tokenizer: TextTokenizer, text: str) -> None:
    ids = small_tokenizer.encode(text, bos=False)
    assert ids.dtype == np.int32
    assert small_tokenizer.decode(ids) == text


def test_bos_comes_once_and_only_in_front(small_tokenizer: TextTokenizer) -> None:
    plain = small_tokenizer.encode("hi", bos=False).tolist()
    assert small_tokenizer.encode("hi", bos=True).tolist() == [0, *plain]
    assert small_tokenizer.encode("<s>hi", bos=True).tolist() == [0, *plain]
    assert small_tokenizer.encode("", bos=True).tolist() == [0]
    assert small_tokenizer.encode("", bos=False).tolist() == []


def test_an_eos_of_the_post_processor_is_dropped(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    folder = edit(small_tokenizer, tmp_path / "t", {})
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=tokens)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_ids == (0,)
    assert tokenizer.eos_id is None
    assert 1 not in tokenizer.encode("hi", bos=True)


@pytest.mark.parametrize(("add_bos", "bos_ids"), [(True, (1,)), (False, ())])
def test_the_configuration_decides_about_bos(
    small_tokenizer: TextTokenizer, tmp_path: Path, add_bos: bool, bos_ids: tuple[int, ...]
) -> None:
    folder = edit(small_tokenizer, tmp_path / "t", {"bos_token": "</s>", "add_bos_token": add_bos})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_ids == bos_ids


def test_the_fingerprint_ignores_settings_that_do_not_affect_ids(
    small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    folder = edit(small_tokenizer, tmp_path / "t", {"chat_template": "x"}, template="y")
    state = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model = state["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]  # the older way to write them
    model["vocab"] = dict(reversed(model["vocab"].items()))
    del model["dropout"], model["byte_fallback"]
    edit_json(folder, post_processor=None, decoder=None, model=model)
    assert load_tokenizer(folder, name="other").fingerprint == small_tokenizer.fingerprint


@pytest.mark.parametrize("change", ["swapped ids", "normalizer", "prefix space"])
def test_the_fingerprint_covers_settings_that_affect_ids(
    small_tokenizer: TextTokenizer, tmp_path: Path, change: str
) -> None:
    folder = edit(small_tokenizer, tmp_path / "t", {})
    state = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    if change == "normalizer":
        state["normalizer"] = {"type": "NFC"}
    elif change == "prefix space":
        state["pre_tokenizer"]["add_prefix_space"] = True
    else:
        vocab = state["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    edit_json(folder, **state)
    assert load_tokenizer(folder).fingerprint != small_tokenizer.fingerprint


def test_token_text_shows_invisible_characters(small_tokenizer: TextTokenizer) -> None:
    def shown(text: str) -> str:
        ids = small_tokenizer.encode(text, bos=False)
        return "".join(small_tokenizer.token_text(token) for token in ids)

    assert shown("a b\n\tc\\'\x00é") == "a␣b\\n\\tc\\\\'\\x00é"
    assert small_tokenizer.token_text(0) == "<s>"
    assert shown("\U0001fae0") == "\\xf0\\x9f\\xab\\xa0"  # bytes of a character that no token holds whole


def test_exact_text_joins_to_the_text(small_tokenizer: TextTokenizer) -> None:
    text = "def add(left,\n\treturn  'x' \\ \x07"
    ids = small_tokenizer.encode(text, bos=False).tolist()
    assert "".join(str(small_tokenizer.exact_text(token)) for token in ids) == text
    assert small_tokenizer.exact_text(0) == "<s>"
    parts = [small_tokenizer.exact_text(token) for token in small_tokenizer.encode("\u00ff", bos=False)]
    assert parts == [None, None]
    assert [small_tokenizer.exact_text(token) for token in (-1, 10**6, 2**40)] == [None] * 3


@pytest.mark.parametrize("spec", ["./nope", "/nope", "~/nope", "models/tokenizer.json"])
def test_a_missing_path_is_not_looked_up_on_the_hub(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        TokenizerError, match=rf"^no such file or folder: {re.escape(spec)}: pass a folder with"
    ):
        load_tokenizer(spec)


def test_templates_get_the_variables_of_transformers(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    template = """{{ bos_token }}{% for message in messages %}
    {% if loop.index > 1 %}{% break %}{% endif %}
    {% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}
{% endfor %}
{{- strftime_now('%Y') | length }}{{ tools is none }}{{ eos_token }}{{ add_generation_prompt }}"""
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    tokenizer = load_tokenizer(edit(small_tokenizer, tmp_path / "t", config, template))
    assert tokenizer.render_chat(CHAT, True) == '<s>{"a": "<é>"}4True</s>True'


def test_documents_are_rendered_on_a_fixed_date_and_requests_on_the_day(
    small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}"
    tokenizer = load_tokenizer(edit(small_tokenizer, tmp_path / "t", {"add_bos_token": False}, template))
    before = date.today()
    found = tokenizer.decode(encode_conversation(tokenizer, CHAT))
    assert found in (str(before), str(date.today()))
    assert tokenizer.render_document(CHAT) == str(DOCUMENT_DATE.date()) != found


def test_the_template_has_a_fingerprint_of_its_own(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    bos = {"bos_token": "<s>"}
    folders = [
        edit(small_tokenizer, tmp_path / "plain", bos),
        edit(small_tokenizer, tmp_path / "one", bos, "one"),
        edit(small_tokenizer, tmp_path / "two", bos, "two"),
        edit(small_tokenizer, tmp_path / "other", {"bos_token": "</s>"}, "two"),
    ]
    tokenizers = [load_tokenizer(folder) for folder in folders]
    assert [tokenizer.has_chat_template for tokenizer in tokenizers] == [False, True, True, True]
    assert len({tokenizer.template_fingerprint for tokenizer in tokenizers}) == 4
    again = load_tokenizer(folders[1], name="other")
    assert again.template_fingerprint == tokenizers[1].template_fingerprint


def test_where_the_template_comes_from(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    listed = edit(small_tokenizer, tmp_path / "listed", {"chat_template": named})
    assert load_tokenizer(listed).render_chat(CHAT, False) == "listed"
    text = edit(small_tokenizer, tmp_path / "text", {"chat_template": "text"})
    assert load_tokenizer(text).render_chat(CHAT, False) == "text"
    file = edit(small_tokenizer, tmp_path / "file", {"chat_template": "text"}, template="file")
    assert load_tokenizer(file).render_chat(CHAT, False) == "file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_is_an_error(
    small_tokenizer: TextTokenizer, tmp_path: Path, template: str
) -> None:
    tokenizer = load_tokenizer(edit(small_tokenizer, tmp_path / "t", {}, template))
    with pytest.raises(TokenizerError, match="chat template of 't'"):
        tokenizer.render_chat(CHAT, False)


def test_hub_names_are_downloaded(
    small_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no network\nmore")

    folder = edit(small_tokenizer, tmp_path / "snapshot", {})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(folder))
    tokenizer = load_tokenizer("org/model")
    assert (tokenizer.name, tokenizer.fingerprint) == ("org/model", small_tokenizer.fingerprint)
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(TokenizerError, match=r"'org/model' .*\(no network\): pass a folder with tokenizer"):
        load_tokenizer("org/model")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json is not a usable tokenizer"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json of 't' is not a JSON object"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja of 't' is not UTF-8"),
        ("chat_template.json", b"[]", "chat_template.json of 't' is not a JSON object"),
    ],
)
def test_broken_files(
    small_tokenizer: TextTokenizer, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    folder = edit(small_tokenizer, tmp_path / "t", {})
    (folder / file).write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


def test_unpaired_surrogates_are_refused(small_tokenizer: TextTokenizer) -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        small_tokenizer.encode("a\ud800", bos=False)
    with pytest.raises(TokenizerError, match="surrogate"):
        small_tokenizer.encode_documents(["a", "\udfff"])


# --- the real tokenizers ---


def test_real_chat_templates(data: Path) -> None:
    qwen = load_tokenizer(data / "tokenizers" / "qwen2.5")
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    turns = "<|im_start|>user\nhi<|im_end|>\n"
    start = f"<|im_start|>system\n{system}<|im_end|>\n{turns}"
    assert qwen.render_chat(CHAT[:1], True) == f"{start}<|im_start|>assistant\n"
    assert qwen.render_chat(CHAT, False) == f"{start}<|im_start|>assistant\nhello<|im_end|>\n"
    smol = load_tokenizer(data / "tokenizers" / "smollm2").render_chat(CHAT[:1], True)
    assert smol.endswith(f"<|im_end|>\n{turns}<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [("llama2", "da34a658ac93b968"), ("qwen2.5", "1fddc2ac33b8e610"), ("smollm2", "bce6833ae66f38ed")],
)
def test_real_fingerprints_are_stable(data: Path, name: str, fingerprint: str) -> None:
    assert load_tokenizer(data / "tokenizers" / name).fingerprint.startswith(fingerprint)


PARTS = "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}"
PARTS += "{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", ["{% for m in messages %}<{{ m.content }}>{% endfor %}", PARTS])
def test_a_processors_template_is_read_where_the_tokenizer_has_none(
    small_tokenizer: TextTokenizer, tmp_path: Path, template: str
) -> None:
    """Some read content only as parts, and show nothing of a text."""
    folder = edit(small_tokenizer, tmp_path / "t", {})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == "<hi><hello>"
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").template_fingerprint == tokenizer.template_fingerprint
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    assert load_tokenizer(folder).render_chat(CHAT, add_generation_prompt=False) == "own"

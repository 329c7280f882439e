"""Greedy answers of a running llama-server: the same as without drafts, drafted and accepted as our double predicts.

The model is SmolLM2-135M-Instruct. The file is exported from a store of every other one of its answers.
"""

import struct
import subprocess
import urllib.error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftstore.engines.llama_cpp import export_cache
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.engines_llama_cpp.server import Answer, launch, started
from tests.fakes.llama_cpp import Drafts, Simple, Slot, read_cache

TOKENS = 40
WHAT = ["rain", "bread", "the moon", "a volcano", "honey", "ice", "a river", "the heart", "sleep", "a tree"]
ASKED = ["What is {}?", "Explain {} to a child."]
CACHE = ("--spec-type", "ngram-cache", "--lookup-cache-static")
SHORT = Simple(3, 8)
SIMPLE = (
    *("--spec-ngram-simple-size-n", str(SHORT.match), "--spec-ngram-simple-size-m", str(SHORT.most)),
    *("--spec-type", "ngram-simple,ngram-cache", "--lookup-cache-static"),
)
RECORD = 28
"""Bytes of two tokens with one follower."""
Texts = list[list[int]]


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> TextTokenizer:
    return load_tokenizer(data / "tokenizers" / "smollm2")


def ask_of(tokenizer: TextTokenizer, question: str) -> list[int]:
    chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer.encode(chat, bos=True).tolist()
    return ids


@pytest.fixture(scope="module")
def prompts(tokenizer: TextTokenizer) -> Texts:
    """Return prompts whose answers are stored, and the others."""
    return [ask_of(tokenizer, asked.format(what)) for asked in ASKED for what in WHAT]


@pytest.fixture(scope="module")
def plain(prompts: Texts, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Return answers without drafts, of a server whose token ids are ours."""
    with started(tmp_path_factory.mktemp("plain")) as server:
        text = "<|im_start|>user\n naïve café, 東京 😀\tand   spaces<|im_end|>"
        assert server.post("/tokenize", {"content": text, "add_special": True, "parse_special": True}) == {
            "tokens": tokenizer.encode(text, bos=True).tolist()
        }
        answers = [server.ask(prompt, TOKENS) for prompt in prompts]
    assert all(answer.ended == "limit" and not answer.drafted for answer in answers)
    return [answer.ids for answer in answers]


@pytest.fixture(scope="module")
def file(plain: Texts, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("file")
    (folder / "answers.txt").write_text(
        "\n\n".join(tokenizer.decode(answer) for answer in plain[: len(WHAT)])
    )
    build_rest(RestOptions(corpus=(folder / "answers.txt",)), tokenizer, folder / "store", workers=1)
    return export_cache(folder / "store", folder / "cache.bin").path


def check(found: Sequence[Answer], prompts: Texts, slot: Slot) -> list[Drafts]:
    """Compare what a slot has drafted for all its answers with what the double foretells."""
    foretold = [slot.answer(prompt, answer.ids) for prompt, answer in zip(prompts, found, strict=True)]
    assert [(answer.drafted, answer.accepted) for answer in found] == [each[1:] for each in foretold]
    return foretold


def rate(drafts: Sequence[Drafts]) -> str:
    """Return tokens a pass."""
    return f"{len(drafts) * (TOKENS - 1) / sum(each.passes for each in drafts):.2f}"


@pytest.mark.parametrize(("options", "simple"), [(CACHE, None), (SIMPLE, SHORT)])
def test_an_exported_file(
    options: Sequence[str], simple: Simple | None, prompts: Texts, plain: Texts, file: Path, tmp_path: Path
) -> None:
    with started(tmp_path, *options, str(file)) as server:
        found = [server.ask(prompt, TOKENS) for prompt in prompts]
    assert [answer.ids for answer in found] == plain
    drafts = check(found, prompts, Slot(read_cache(file), simple=simple))
    stored, others = drafts[: len(WHAT)], drafts[len(WHAT) :]
    print(f"{options[-2]}: {rate(stored)} tokens a pass where the answer is stored, {rate(others)} elsewhere")
    assert sum(each.accepted for each in stored) > sum(each.passes for each in stored)
    assert sum(each.accepted for each in others) > 0


def test_two_slots_at_once(prompts: Texts, plain: Texts, file: Path, tmp_path: Path) -> None:
    """Answers that are read together may differ where two tokens are as likely but for rounding."""
    part = 4
    with started(tmp_path, *CACHE, str(file), slots=2) as server, ThreadPoolExecutor(2) as pool:

        def ask(slot: int) -> list[Answer]:
            return [server.ask(prompt, TOKENS, slot) for prompt in prompts[slot : 2 * part : 2]]

        found = list(pool.map(ask, range(2)))
    same = 0
    for slot in range(2):
        places = slice(slot, 2 * part, 2)
        check(found[slot], prompts[places], Slot(read_cache(file)))
        same += sum(answer.ids == ids for answer, ids in zip(found[slot], plain[places], strict=True))
    assert same > part


def test_a_slot_is_never_reset(
    tokenizer: TextTokenizer, prompts: Texts, plain: Texts, tmp_path: Path
) -> None:
    """A long text is drafted from as long as the server runs, and of shorter ones after it nothing is learned."""
    long = ask_of(tokenizer, "Say again: " + tokenizer.decode(plain[0]) * 3)
    asked = [long, prompts[0], prompts[1]]
    with started(tmp_path, "--spec-type", "ngram-cache") as server:
        found = [server.ask(prompt, TOKENS) for prompt in asked]
    check(found, asked, Slot({}))
    assert found[1].accepted > TOKENS / 2
    assert found[1].drafted > Slot({}).answer(prompts[0], found[1].ids).drafted


def outcome(log: Path, file: Path) -> str:
    """Return what a server writes that does not start."""
    process = launch(log, *CACHE, str(file), "--port", "0")
    try:
        assert process.wait(60) == -6, "it aborts"
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return log.read_text()


def test_a_file_that_is_missing_or_cut(file: Path, tmp_path: Path) -> None:
    assert "failed to open static lookup cache" in outcome(tmp_path / "log", tmp_path / "missing.bin")
    cut = tmp_path / "cut.bin"
    cut.write_bytes(file.read_bytes()[: 3 * RECORD - 12])
    assert "GGML_ASSERT(hashmap_file.read(ntokensc" in outcome(tmp_path / "log", cut)
    cut.write_bytes(file.read_bytes()[: 3 * RECORD - 13])
    with started(tmp_path, *CACHE, str(cut)):
        assert len(read_cache(cut)) == 2, "less than two tokens and their filling are passed over"


def test_ids_that_the_model_lacks(prompts: Texts, plain: Texts, tmp_path: Path) -> None:
    """A file of another tokenizer is not noticed; an id beyond the model's costs the answer, not the server."""
    wrong = tmp_path / "wrong.bin"
    wrong.write_bytes(struct.pack("<7i", *plain[0][5:7], -1, -1, 1, 60_000, 9))
    with started(tmp_path, *CACHE, str(wrong)) as server:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            server.ask(prompts[0], TOKENS)
        assert server.ask(prompts[1], TOKENS).ids == plain[1]

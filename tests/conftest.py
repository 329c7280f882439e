"""Shared fixtures: a small tokenizer trained on the spot, and the optional test data."""

import json
import os
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import draftstore
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from services.lookup import served
from tests.fakes.kernels import remove_stale_kernels

# A machine with a GPU, on which `python -m benchmarks.gpu` runs some tests, need not have the packages of databases.
pytest_plugins = ["tests.fakes.databases"] if find_spec("psycopg") else []

TRAINING_TEXT = [
    "def add(left, right):\n    return left + right\n",
    "USER: hi, how are you? ASSISTANT: I am well, thank you.\n\n",
    "The quick brown fox jumps over the lazy dog; the dog does not mind.\n",
    "for item in items:\n    if item is not None:\n        print(item)\n",
    "naïve café, 東京, emoji 😀, tabs\tand   spaces\n",
]


def pytest_configure(config: pytest.Config) -> None:
    """Begin without compiled kernels of older sources."""
    remove_stale_kernels(Path(draftstore.__file__).parent)
    # Machines are busy, and kernels are compiled first. The same examples come on every machine and in every run.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", patient, derandomize=True, max_examples=25)
    settings.register_profile("new", patient, max_examples=1_000, print_blob=True)
    settings.load_profile(config.getoption("--hypothesis-profile") or "same")


def pytest_xdist_auto_num_workers() -> int:
    """Run one process more than there are cores: many tests wait for something."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for the data, so that `-m 'not data'` leaves it out."""
    for item in items:
        if "data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.data)


@pytest.fixture(scope="module")
def no_fsync() -> Iterator[None]:
    """Do not wait for the disk, in modules whose tests end processes but never the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_samples() -> Iterator[None]:
    """Warm stores with few drafts: tests start servers by the hundred."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "SAMPLES", 20)
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder of test texts and tokenizers; skip where there is none."""
    folder = os.environ.get("DRAFTSTORE_TEST_DATA")
    if not folder:
        pytest.skip("DRAFTSTORE_TEST_DATA is not set: no real texts and tokenizers to test with")
    if not Path(folder).is_dir():
        pytest.fail(f"DRAFTSTORE_TEST_DATA={folder} is not a folder")
    return Path(folder)


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Return a byte-level BPE of at most 384 ids that knows any text and prepends `<s>` (id 0)."""
    return load_tokenizer(small_tokenizer_folder(tmp_path_factory.mktemp("small") / "small-bpe"))


def wordy_tokenizer_folder(folder: Path) -> Path:
    """Write the files of a tokenizer of the words `one` and `two`, which makes nothing of all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {
        piece: number for number, piece in enumerate(["o", "n", "e", "t", "w", "on", "tw", "one", "two"])
    }
    merges = [("o", "n"), ("t", "w"), ("on", "e"), ("tw", "o")]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def small_tokenizer_folder(folder: Path) -> Path:
    """Train the small tokenizer and write its files into a new folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_texts(path: Path, documents: int, seed: int = 0) -> Path:
    """Write a JSON Lines file of random word salads, always the same for one seed."""
    salad = random.Random(seed)
    words = " ".join(TRAINING_TEXT).split(" ")
    texts = (" ".join(salad.choices(words, k=salad.randint(1, 60))) for _ in range(documents))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a JSON Lines file of 60 short documents."""
    return write_texts(tmp_path_factory.mktemp("corpus") / "small.jsonl", 60)


@pytest.fixture(scope="session")
def small_store(
    small_corpus: Path, small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a store of the small corpus in several segments; tests that change a store copy it."""
    out = tmp_path_factory.mktemp("stores") / "small"
    options = RestOptions(corpus=(small_corpus,), name="small", segment_tokens=1_000)
    build_rest(options, small_tokenizer, out, workers=1)
    return out


@pytest.fixture(scope="session")
def small_crest(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a CREST store of 400 n-grams of the small store; tests that change it copy it."""
    out = tmp_path_factory.mktemp("crest") / "small-crest"
    options = CrestOptions(name="small-crest", max_n=4, ngrams=400)
    build_crest(options, small_store, out)
    return out


@pytest.fixture(scope="session")
def small_dense(
    small_corpus: Path, small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a dense store of a third of the small corpus, with made-up hidden states; tests that change it copy it."""
    from tests.fakes.dense_stores import make_dense_store

    lines = small_corpus.read_text(encoding="utf-8").splitlines()[:20]
    documents = [small_tokenizer.encode(json.loads(line)["text"], bos=True).tolist() for line in lines]
    out = tmp_path_factory.mktemp("dense") / "small-dense"
    return make_dense_store(out, documents, tokenizer=small_tokenizer)


@pytest.fixture(scope="session")
def wide_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Return a tokenizer of 70,000 words `w0` to `w69999`, so that ids need 32 bits."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("wide") / "wide-words"
    folder.mkdir()
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def wide_store(wide_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with ids around 65,535 and at the end of a vocabulary of 70,000, in several segments."""
    folder = tmp_path_factory.mktemp("wide-store")
    salad = random.Random(3)
    ids = [5, 65_533, 65_534, 65_535, 65_536, 65_537, 69_998, 69_999]
    texts = (" ".join(f"w{i}" for i in salad.choices(ids, k=salad.randint(1, 30))) for _ in range(40))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = RestOptions(corpus=(folder / "c.jsonl",), name="wide", segment_tokens=200)
    build_rest(options, wide_tokenizer, folder / "store", workers=1)
    return folder / "store"


@pytest.fixture(scope="session")
def wide_crest(wide_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a CREST store with keys of 32-bit ids; tests that change it copy it."""
    out = tmp_path_factory.mktemp("crest") / "wide-crest"
    build_crest(CrestOptions(name="wide-crest", max_n=3, ngrams=150), wide_store, out)
    return out

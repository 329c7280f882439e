"""Greedy answers of a running SGLang: those without drafts, in as many passes as the replay foretells.

The model is stories260K. One server has most cases, each as a corpus of its own; two more are started with options.
"""

import dataclasses
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from draftstore.assembly import Sources, assemble
from draftstore.decoding.replay import Recording, replay
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.engines_sglang.server import DRAFTS, Answer, Server, end, launch, started
from tests.fakes.served import Service, served

LONG, TOKENS, ROWS = 200, 64, 17
BUDGET = ROWS - 1
WHO = ["a little girl named Lily", "a big dog", "a boy named Tim", "a small cat", "a red bird", "two friends"]
WHAT = ["Once upon a time, there was {}. One day,", "In the park, {} saw a big tree and"]
PATTERN = r"[A-Z][a-z]+ (went|ran) to the [a-z ]{20,40}\."
Texts = list[list[int]]


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    folder = data / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> TextTokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def prompts(tokenizer: TextTokenizer) -> Texts:
    return [tokenizer.encode(what.format(who), bos=True).tolist() for who in WHO for what in WHAT]


@dataclasses.dataclass(frozen=True)
class Plain:
    """Answers without drafts: of `LONG` tokens, and one in a grammar."""

    answers: Texts
    grammar: list[int]

    @property
    def short(self) -> Texts:
        return [answer[:TOKENS] for answer in self.answers]


@pytest.fixture(scope="module")
def plain(model: Path, prompts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    with started(model, tmp_path_factory.mktemp("plain")) as server:
        answers = server.ask(prompts, max_new_tokens=LONG)
        [grammar] = server.ask(prompts[:1], max_new_tokens=TOKENS, regex=PATTERN, ignore_eos=False)
        assert not any(answer.passes for answer in answers)
        return Plain([answer.ids for answer in answers], grammar.ids)


def build(prompts: Texts, answers: Texts, tokenizer: TextTokenizer, folder: Path) -> Path:
    """Return a store of answers."""
    texts = [
        tokenizer.decode([*prompt[1:], *answer]) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    (folder.parent / f"{folder.name}.txt").write_text("\n\n".join(texts))
    build_rest(
        RestOptions(corpus=(folder.parent / f"{folder.name}.txt",), name=folder.name),
        tokenizer,
        folder,
        workers=1,
    )
    return folder


@pytest.fixture(scope="module")
def stores(
    plain: Plain, prompts: Texts, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return stores of every other answer: those of the first kind of prompt, and those of the second."""
    folder = tmp_path_factory.mktemp("stores")
    return {
        name: build(prompts[start::2], plain.answers[start::2], tokenizer, folder / name)
        for start, name in enumerate(["common", "acme"])
    }


@pytest.fixture(scope="module")
def foretell(plain: Plain, prompts: Texts, stores: dict[str, Path], tokenizer: TextTokenizer) -> "Foretell":
    return Foretell(prompts, plain.short, stores, tokenizer)


@dataclasses.dataclass
class Foretell:
    """Passes of our replay."""

    prompts: Texts
    answers: Texts
    stores: dict[str, Path]
    tokenizer: TextTokenizer

    def __call__(self, store: str = "common", budget: int = BUDGET, chain: int | None = None) -> int:
        recordings = [
            Recording(str(place), np.array(prompt, np.int32), np.array(answer, np.int32))
            for place, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True))
        ]
        sources = Sources(stores=(self.stores[store],))
        with assemble(
            sources, vocab_size=self.tokenizer.vocab_size, tokenizer=self.tokenizer.identity
        ) as alone:
            return replay(alone, recordings, budget=budget, chain=chain).passes


@pytest.fixture(scope="module")
def service(stores: dict[str, Path]) -> Iterator[Service]:
    with served("--store", stores["common"], "--http", "none") as running:
        yield running


@pytest.fixture(scope="module")
def server(
    model: Path, stores: dict[str, Path], service: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "draftstore.toml").write_text(
        f"""
        stores = ["{stores["common"]}"]
        [corpora.acme]
        stores = ["{stores["acme"]}"]
        [corpora.service]
        lookup = "unix:{service.socket}"
        release = "common"
        deadline = 30
        [corpora.team]
        live = "team"
        request = false
        """
    )
    with started(model, folder, *DRAFTS, DRAFTSTORE_ENGINE_CONFIG=str(folder / "draftstore.toml")) as running:
        yield running


def passes(answers: Sequence[Answer]) -> int:
    return sum(answer.passes for answer in answers)


def ids(answers: Sequence[Answer]) -> Texts:
    return [answer.ids for answer in answers]


@pytest.mark.parametrize("together", [1, 4])
def test_a_local_store_and_the_request(
    together: int, server: Server, prompts: Texts, plain: Plain, foretell: Foretell
) -> None:
    answers = [
        answer
        for start in range(0, len(prompts), together)
        for answer in server.ask(prompts[start : start + together], max_new_tokens=TOKENS)
    ]
    assert ids(answers) == plain.short
    print(f"{len(prompts) * (TOKENS - 1) / passes(answers):.2f} tokens a pass")
    assert passes(answers) == foretell()


def test_a_corpus_by_request(server: Server, prompts: Texts, plain: Plain, foretell: Foretell) -> None:
    answers = server.ask(prompts, {"corpus": "acme"}, max_new_tokens=TOKENS)
    assert ids(answers) == plain.short
    assert passes(answers) == foretell("acme") != foretell()


def test_a_budget_by_request(server: Server, prompts: Texts, plain: Plain, foretell: Foretell) -> None:
    found = {}
    for budget in (0, 3, BUDGET):
        answers = server.ask(prompts, {"budget": budget}, max_new_tokens=TOKENS)
        assert ids(answers) == plain.short
        found[budget] = passes(answers)
    assert found[BUDGET] == foretell() < found[3] < found[0]
    assert found[0] > 0.95 * len(prompts) * (
        TOKENS - 1
    )  # padding, a run of the last token, is right at times


def test_an_unknown_corpus_drafts_nothing(server: Server, prompts: Texts, plain: Plain) -> None:
    answers = server.ask(prompts, {"corpus": "nobody"}, max_new_tokens=TOKENS)
    assert ids(answers) == plain.short
    assert passes(answers) > 0.95 * len(prompts) * (TOKENS - 1)


def test_answers_of_a_moment_ago(server: Server, prompts: Texts, plain: Plain) -> None:
    team, off = {"corpus": "team"}, {"corpus": "team", "live": False}
    [first] = server.ask(prompts[:1], team, max_new_tokens=TOKENS)
    [again] = server.ask(prompts[:1], team, max_new_tokens=TOKENS)
    [without] = server.ask(prompts[:1], off, max_new_tokens=TOKENS)
    assert ids([first, again, without]) == plain.short[:1] * 3
    print(f"passes: {first.passes}, again {again.passes}, without {without.passes}")
    assert again.passes < TOKENS / 4
    assert without.passes == first.passes > 0.9 * TOKENS


def test_one_id_for_many_requests(server: Server, prompts: Texts, plain: Plain, foretell: Foretell) -> None:
    answers = [server.ask([prompt], rid="one", max_new_tokens=TOKENS)[0] for prompt in prompts]
    assert ids(answers) == plain.short
    assert passes(answers) == foretell()


def test_streams(server: Server, prompts: Texts, plain: Plain) -> None:
    pieces = [list(server.stream(prompt, max_new_tokens=TOKENS)) for prompt in prompts[:3]]
    assert ids([each[-1] for each in pieces]) == plain.short[:3]
    assert all(len(each) > 2 for each in pieces)


def test_prompts_that_are_in_the_cache(server: Server, prompts: Texts, plain: Plain) -> None:
    """Go on from the middle of answers: most of such a prompt has been read before, in rows of trees."""
    half = TOKENS // 2
    longer = [[*prompt, *answer[:half]] for prompt, answer in zip(prompts, plain.short, strict=True)]
    server.ask(prompts, max_new_tokens=TOKENS)
    answers = server.ask(longer, max_new_tokens=half)
    assert ids(answers) == [answer[half:] for answer in plain.short]
    assert all(answer.cached >= len(prompt) for answer, prompt in zip(answers, prompts, strict=True))


def test_requests_that_are_put_back(server: Server, prompts: Texts, plain: Plain) -> None:
    answers = server.ask(prompts, max_new_tokens=LONG)
    assert ids(answers) == plain.answers
    assert sum(answer.retractions for answer in answers) > 0
    print(f"{len(prompts) * (LONG - 1) / passes(answers):.2f} tokens a pass")
    assert passes(answers) < 0.5 * len(prompts) * LONG


def test_a_grammar(server: Server, prompts: Texts, plain: Plain) -> None:
    [answer] = server.ask(prompts[:1], max_new_tokens=TOKENS, regex=PATTERN, ignore_eos=False)
    assert answer.ids == plain.grammar
    print(f"{len(answer.ids)} tokens in {answer.passes} passes")
    assert 0 < answer.passes < len(answer.ids) - 1


def test_the_lookup_service_and_its_end(
    server: Server, service: Service, prompts: Texts, plain: Plain, foretell: Foretell
) -> None:
    wishes = {"corpus": "service"}
    answers = server.ask(prompts, wishes, max_new_tokens=TOKENS)
    assert ids(answers) == plain.short
    assert passes(answers) == foretell()
    running = server.stream(prompts[0], wishes, max_new_tokens=LONG)
    pieces = [next(running), next(running)]
    service.signal(signal.SIGKILL)
    pieces += running
    assert pieces[1].ids != pieces[-1].ids == plain.answers[0]
    assert ids(server.ask(prompts, wishes, max_new_tokens=TOKENS)) == plain.short


def test_chains(
    model: Path, prompts: Texts, plain: Plain, stores: dict[str, Path], foretell: Foretell, tmp_path: Path
) -> None:
    """Verify chains, in pages of 4 tokens."""
    chains = (
        "--speculative-ngram-max-bfs-breadth",
        "1",
        "--speculative-num-draft-tokens",
        "9",
        "--page-size",
        "4",
    )
    with started(model, tmp_path, *DRAFTS, *chains, DRAFTSTORE_STORES=str(stores["common"])) as server:
        answers = server.ask(prompts, max_new_tokens=TOKENS)
    assert ids(answers) == plain.short
    assert passes(answers) == foretell(budget=8, chain=8)


def test_two_processes_for_a_model(
    model: Path, prompts: Texts, plain: Plain, stores: dict[str, Path], foretell: Foretell, tmp_path: Path
) -> None:
    two = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "DRAFTSTORE_STORES": str(stores["common"])}
    with started(model, tmp_path, *DRAFTS, "--tp", "2", **two) as server:
        answers = server.ask(prompts, max_new_tokens=TOKENS)
    assert ids(answers) == plain.short
    assert passes(answers) == foretell()


def test_what_is_refused_at_the_start(
    model: Path, stores: dict[str, Path], small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "small").mkdir()
    small_tokenizer.save(tmp_path / "small")
    store = str(stores["common"])
    cases: dict[str, tuple[list[str], dict[str, str]]] = {
        "tokenizer": ([], {"DRAFTSTORE_STORES": store, "DRAFTSTORE_TOKENIZER": str(tmp_path / "small")}),
        str(tmp_path / "nowhere"): ([], {"DRAFTSTORE_STORES": str(tmp_path / "nowhere")}),
        "pages of 4 tokens": (["--page-size", "4"], {"DRAFTSTORE_STORES": store}),
    }

    def said(place: int, options: list[str], environment: dict[str, str]) -> str:
        process = launch(model, tmp_path / f"log{place}", *DRAFTS, *options, **environment)
        try:
            assert process.wait(240) != 0
        finally:
            end(process)
        return (tmp_path / f"log{place}").read_text()

    with ThreadPoolExecutor() as pool:
        logs = pool.map(said, range(len(cases)), *zip(*cases.values(), strict=True))
    for words, log in zip(cases, logs, strict=True):
        [*_, line] = [line for line in log.splitlines() if "draftstore.errors" in line]
        assert words in line

"""Greedy answers of a running SGLang: the same as without drafts, in as many passes as the replay predicts.

The model is stories260K. One server has most cases, each with its own corpus; two more have other options.
"""

import dataclasses
import json
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from draftstore.assembly.drafter import Assembly, assemble
from draftstore.assembly.sources import Sources
from draftstore.decoding.replay import Recording, replay
from draftstore.live.store import LiveTarget
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.engines_sglang.server import DRAFTS, Answer, Server, launched
from tests.fakes.served import Service, served
from tests.fakes.waiting import until

LONG, TOKENS, ROWS = 200, 64, 17
BUDGET = ROWS - 1
LUCK = 0.05
"""Share of passes that padding, a run of the last token, may save where nothing is drafted."""
WHO = ["a little girl named Lily", "a big dog", "a boy named Tim", "a small cat", "a red bird", "two friends"]
WHAT = ["Once upon a time, there was {}. One day,", "In the park, {} saw a big tree and"]
PATTERN = r"[A-Z][a-z]+ (went|ran) to the [a-z ]{20,40}\."
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Lily", "Tim"]}, "pets": {"enum": ["a cat", "a dog", "a red bird"]}},
        "required": ["name", "pets"],
        "additionalProperties": False,
    }
)
GRAMMARS = ({"regex": PATTERN}, {"json_schema": SCHEMA})
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
    """Answers without drafts: of `LONG` tokens, and one in each of `GRAMMARS`."""

    answers: Texts
    grammars: Texts

    @property
    def short(self) -> Texts:
        return [answer[:TOKENS] for answer in self.answers]


@pytest.fixture(scope="module")
def refused(
    model: Path, small_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Launch what should not start: with a store of another tokenizer, and with trees in pages."""
    store = {"DRAFTSTORE_STORES": str(small_store)}
    with (
        launched(model, tmp_path_factory.mktemp("refused"), *DRAFTS, **store) as other,
        launched(model, tmp_path_factory.mktemp("refused"), *DRAFTS, "--page-size", "4", **store) as pages,
    ):
        yield {"tokenizer": other, "pages of 4 tokens": pages}


@pytest.fixture(scope="module")
def plain(
    model: Path, prompts: Texts, refused: dict[str, Server], tmp_path_factory: pytest.TempPathFactory
) -> Plain:
    """Answer without drafts, in a server that starts beside those that are refused."""
    with launched(model, tmp_path_factory.mktemp("plain")) as server:
        answers = server.ready().ask(prompts, max_new_tokens=LONG)
        grammars = [
            server.ask(prompts[:1], max_new_tokens=TOKENS, ignore_eos=False, **grammar)[0]
            for grammar in GRAMMARS
        ]
        assert not any(answer.passes for answer in [*answers, *grammars])
        return Plain(ids(answers), ids(grammars))


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
        with self._opened(Sources(stores=(self.stores[store],))) as alone:
            return replay(alone, self._recordings, budget=budget, chain=chain).passes

    def of_live(self, *parts: slice) -> list[int]:
        """Return the passes of parts one after the other, with drafts from the answers before alone."""
        with self._opened(Sources(request=False, live=LiveTarget("team"))) as alone:

            def learn(one: Recording) -> None:
                alone.remember(one.prompt, one.output)

            return [
                replay(alone, self._recordings[part], budget=BUDGET, learn=learn).passes for part in parts
            ]

    def is_known(self, replica: Service, answer: list[int]) -> bool:
        """Return True if a service drafts the end of an answer from its live store."""
        sources = Sources(
            lookup=f"unix:{replica.socket}", live=LiveTarget("shared"), request=False, deadline=1.0
        )
        with self._opened(sources) as asking:
            return not answer or asking.session(answer[:-1]).propose(1).tokens.tolist() == answer[-1:]

    @property
    def _recordings(self) -> list[Recording]:
        return [
            Recording(str(place), np.array(prompt, np.int32), np.array(answer, np.int32))
            for place, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True))
        ]

    def _opened(self, sources: Sources) -> Assembly:
        return assemble(sources, vocab_size=self.tokenizer.vocab_size, tokenizer=self.tokenizer.identity)


@pytest.fixture(scope="module")
def service(stores: dict[str, Path]) -> Iterator[Service]:
    with served("--store", stores["common"], "--http", "none") as running:
        yield running


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Run two services that share the log of a live store."""
    live = ("--live", f"shared={tmp_path_factory.mktemp('live')}:100000", "--http", "none")
    with served(*live) as first, served(*live) as other:
        yield [first, other]


@pytest.fixture(scope="module")
def servers(
    model: Path,
    stores: dict[str, Path],
    service: Service,
    replicas: list[Service],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Server]]:
    """Launch one with a corpus for each case, one of two processes, and one that verifies chains."""
    common = f'stores = ["{stores["common"]}"]'
    corpora = f"""
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
    chains = ["--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", "9"]
    with ExitStack() as stack:

        def launch(name: str, settings: str, *options: str, **variables: str) -> Server:
            folder = tmp_path_factory.mktemp(name)
            file = folder / "draftstore.toml"
            file.write_text(settings)
            variables["DRAFTSTORE_ENGINE_CONFIG"] = str(file)
            return stack.enter_context(launched(model, folder, *DRAFTS, *options, **variables))

        yield {
            "one": launch("one", common + corpora + shared(replicas[0])),
            "two": launch(
                "two", common + shared(replicas[1]), "--tp", "2", SGLANG_CPU_OMP_THREADS_BIND="0|1"
            ),
            "chains": launch("chains", common, *chains, "--page-size", "4"),
        }


@pytest.fixture(scope="module")
def server(servers: dict[str, Server]) -> Server:
    return servers["one"].ready()


@pytest.fixture(scope="module")
def second(servers: dict[str, Server]) -> Server:
    return servers["two"].ready()


def shared(replica: Service) -> str:
    """Return the settings of a corpus that is the live store of a service."""
    return f"""
        [corpora.shared]
        lookup = "unix:{replica.socket}"
        live = "shared"
        request = false
        deadline = 30
        """


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
    assert found[0] == pytest.approx(len(prompts) * (TOKENS - 1), rel=LUCK)


def test_answers_of_a_moment_ago(server: Server, prompts: Texts, plain: Plain, foretell: Foretell) -> None:
    team, off = {"corpus": "team"}, {"corpus": "team", "live": False}
    [first] = server.ask(prompts[:1], team, max_new_tokens=TOKENS)
    [again] = server.ask(prompts[:1], team, max_new_tokens=TOKENS)
    [without] = server.ask(prompts[:1], off, max_new_tokens=TOKENS)
    assert ids([first, again, without]) == plain.short[:1] * 3
    print(f"passes: {first.passes}, again {again.passes}")
    [_, expected] = foretell.of_live(slice(1), slice(1))
    assert again.passes == expected
    assert first.passes == without.passes == pytest.approx(TOKENS - 1, rel=LUCK)


def test_a_prediction_by_request(
    server: Server, prompts: Texts, plain: Plain, tokenizer: TextTokenizer
) -> None:
    wishes = {"corpus": "team", "live": False, "prediction": tokenizer.decode(plain.short[1])}
    [right, wrong] = server.ask(prompts[1:3], wishes, max_new_tokens=TOKENS)
    assert ids([right, wrong]) == plain.short[1:3]
    print(f"passes: {right.passes} with the answer as the prediction, {wrong.passes} with another")
    assert right.passes < TOKENS / 4 < wrong.passes


def test_answers_of_another_server_a_moment_ago(
    server: Server, second: Server, replicas: list[Service], prompts: Texts, plain: Plain, foretell: Foretell
) -> None:
    """Each server asks a lookup service of its own; these share the log of a live store."""
    ours, theirs = slice(3), slice(3, 6)
    turns = [(server, 0, ours), (second, 1, ours), (second, 1, theirs), (server, 0, theirs)]
    found = []
    last: list[int] = []
    for asked, place, part in turns:
        until(partial(foretell.is_known, replicas[place], last))
        answers = [
            asked.ask([each], {"corpus": "shared"}, max_new_tokens=TOKENS)[0] for each in prompts[part]
        ]
        assert ids(answers) == plain.short[part]
        found.append(passes(answers))
        last = answers[-1].ids
    print(f"passes: {found}")
    expected = foretell.of_live(*(part for _, _, part in turns))
    assert found[1::2] == expected[1::2]
    assert found[::2] == pytest.approx(expected[::2], rel=LUCK)


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


def test_grammars(server: Server, prompts: Texts, plain: Plain, tokenizer: TextTokenizer) -> None:
    for grammar, expected in zip(GRAMMARS, plain.grammars, strict=True):
        answers = [
            server.ask(prompts[:1], {"corpus": "team"}, ignore_eos=False, max_new_tokens=TOKENS, **grammar)[0]
            for _ in range(2)
        ]
        assert ids(answers) == [expected] * 2
        print(f"{len(expected)} tokens in {answers[0].passes} passes, again in {answers[1].passes}")
        assert 0 < answers[1].passes < len(expected) / 2
    sentence, record = (tokenizer.decode(expected[:-1]) for expected in plain.grammars)
    assert re.fullmatch(PATTERN, sentence.strip())
    assert json.loads(record).keys() == {"name", "pets"}


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


def test_chains(servers: dict[str, Server], prompts: Texts, plain: Plain, foretell: Foretell) -> None:
    answers = servers["chains"].ready().ask(prompts, max_new_tokens=TOKENS)
    assert ids(answers) == plain.short
    assert passes(answers) == foretell(budget=8, chain=8)


def test_two_processes_for_a_model(second: Server, prompts: Texts, plain: Plain, foretell: Foretell) -> None:
    answers = second.ask(prompts, max_new_tokens=TOKENS)
    assert ids(answers) == plain.short
    assert passes(answers) == foretell()
    longer = second.ask(prompts, max_new_tokens=LONG)
    assert ids(longer) == plain.answers
    assert sum(answer.retractions for answer in longer) > 0


def test_what_is_refused_at_the_start(refused: dict[str, Server]) -> None:
    for words, server in refused.items():
        assert words in server.refusal()

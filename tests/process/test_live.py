"""Live stores shared by real services and workers: the answers of one draft for the others, and kills lose little."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from draftstore.assembly.drafter import Assembly, assemble
from draftstore.assembly.sources import Sources
from draftstore.live.log import read_since, segments
from draftstore.live.store import LiveTarget
from draftstore.remote.client import RemoteStore
from draftstore.storage.manifest import TokenizerIdentity
from tests.fakes.served import Service, served
from tests.fakes.waiting import until
from tests.fakes.workers import served_worker

VOCAB = 1000
WHOSE = TokenizerIdentity("somebody's", "5e" * 32)
PROMPT = "Once upon a time, there was a little girl named Lily."


def remembering(service: Service, name: str = "team") -> Assembly:
    """Return the drafts of a live store of a service, and nothing else."""
    sources = Sources(lookup=f"unix:{service.socket}", live=LiveTarget(name), request=False, deadline=5.0)
    return assemble(sources, vocab_size=VOCAB, tokenizer=WHOSE)


def drafted(decoder: Assembly, context: np.ndarray, budget: int = 4) -> list[int]:
    found: list[int] = decoder.session(context).propose(budget).tokens.tolist()
    return found


def logged(log: Path) -> int:
    """Return the number of documents in a log."""
    return sum(len(read_since(path)[0]) for path in segments(log))


@contextmanager
def started_worker(service: Service, data: Path, folder: Path, *options: object) -> Iterator[Service]:
    """Start a worker with a small trained model, which drafts from the live store of a service alone."""
    folder.mkdir()
    sources = ("--lookup", f"unix:{service.socket}", "--live", "team", "--no-request")
    settings = ("--dtype", "float64", "--fixed-budget", "--lookup-deadline", "5")
    model = data / "models" / "stories260K"
    with served_worker("--model", model, *sources, *settings, *options, folder=folder) as worker:
        yield worker


def ask(worker: Service, **wishes: Any) -> dict[str, Any]:
    """Return the reply of a worker to the prompt."""
    asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "draftstore": wishes}
    status, body = worker.request("POST", "/v1/completions", asked)
    assert status == 200, body
    reply: dict[str, Any] = json.loads(body)
    return reply


def accepted_length(reply: dict[str, Any]) -> float:
    """Return the tokens per pass of a reply."""
    found: float = reply["usage"]["draftstore"]["accepted_length"]
    return found


def test_workers_learn_from_each_other(data: Path, tmp_path: Path) -> None:
    log = tmp_path / "live"
    with ExitStack() as stack:
        workers = []
        for name in ("first", "second"):  # each with a service of its own, over one log
            service = stack.enter_context(served("--live", f"team={log}:100000", "--live", "others"))
            workers.append(stack.enter_context(started_worker(service, data, tmp_path / name)))
        plain = ask(workers[0], budget=0, live=False)
        assert not logged(log)
        assert ask(workers[0])["choices"] == plain["choices"]
        sleep(1.0)
        assert logged(log) == 1
        learned, unlearned = ask(workers[1]), ask(workers[1], live=False)
        assert learned["choices"] == unlearned["choices"] == plain["choices"]
        assert learned["usage"]["draftstore"]["sources"].keys() == {"live:team"}
        assert accepted_length(unlearned) == 1.0
        assert accepted_length(learned) > 3.0


@pytest.mark.slow
def test_an_answer_of_one_worker_is_recalled_by_another_until_it_is_forgotten(
    data: Path, tmp_path: Path
) -> None:
    log = tmp_path / "live"
    with ExitStack() as stack:
        service = stack.enter_context(served("--live", f"team={log}:100000"))
        first, second = (
            stack.enter_context(started_worker(service, data, tmp_path / name, "--recall", 16))
            for name in ("first", "second")
        )
        plain, replies = ask(first, live=False), [ask(first)]
        until(lambda: logged(log) == 1)
        replies.append(ask(second))
        assert replies[-1]["usage"]["draftstore"]["sources"].keys() == {"live:team", "recall:team"}
        with RemoteStore(service.socket, "team") as store:
            store.forget(before=1)
        assert logged(log) == 0
        replies.append(ask(first))
        until(lambda: logged(log) == 1)
        replies.append(ask(second))
        service.process.kill()
        service.process.wait()
        replies.append(ask(first))
        assert all(reply["choices"] == plain["choices"] for reply in replies)
        drafted = [accepted_length(reply) > 3.0 for reply in replies]
        assert drafted == [False, True, False, True, False]


@pytest.mark.parametrize("seed", range(2))
def test_kills_lose_no_more_than_the_last_second(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    answers: list[np.ndarray] = []
    confirmed = 0
    for _ in range(2):
        with served("--live", f"team={tmp_path}:1000000") as service, remembering(service) as decoder:
            counters = decoder.parts[0].drafter.store.counters  # type: ignore[attr-defined]
            for answer in answers[:confirmed]:
                assert drafted(decoder, answer[:30]) == answer[30:34].tolist()
            end = monotonic() + rng.uniform(0.05, 0.5)
            while monotonic() < end:
                answers.append(rng.integers(0, VOCAB, 40))
                decoder.remember(answers[-1][:10], answers[-1][10:])
            assert counters["lost"] == 0
            confirmed = len(answers)
            service.process.kill()
            service.process.wait()
            before = monotonic()
            decoder.remember(answers[0][:10], answers[0][10:])
            assert drafted(decoder, answers[0][:30]) == []
            assert monotonic() - before < 2.0
            assert counters["lost"] == 1
    oldest = segments(tmp_path)[0]
    oldest.write_bytes(oldest.read_bytes()[: -int(rng.integers(1, 40))])  # torn
    pairs = {pair for answer in answers for pair in pairwise(answer.tolist())}
    with served("--live", f"team={tmp_path}:1000000") as service, remembering(service) as decoder:
        lost = 0
        for answer in answers:
            tree = decoder.session(answer[:30]).propose(4)
            lost += tree.tokens.tolist() != answer[30:34].tolist()
            before_each = [int(tree.tokens[at]) if at >= 0 else int(answer[29]) for at in tree.parents]
            assert {*zip(before_each, tree.tokens.tolist(), strict=True)} <= pairs  # of what was answered
        assert lost <= 1

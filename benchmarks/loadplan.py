"""What the load generator sends and what it must get back: frames, and their answers by every build that may answer.

A plan is a file of arrays, so that the generator needs nothing of draftstore: neither stores nor kernels.
"""

import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SEED = 20240601
DURATION = slice(20, 24)
"""Bytes of an answer's payload that say how long the lookup took: they alone differ from answer to answer."""
_TABLE = 24
_BATCH = struct.Struct("<H")


class Question(NamedTuple):
    """One kind of request.

    Attributes:
        release: name of the release or store.
        strategy: empty for its default.
        contexts: int32 [requests, batch, width].
        budget: most nodes of a tree.
        min_prob: least probability of a node.
    """

    release: str
    strategy: str
    contexts: NDArray[np.int32]
    budget: int = 64
    min_prob: float = 0.0

    @property
    def label(self) -> dict[str, Any]:
        """What distinguishes it from others."""
        return {
            "release": self.release,
            "strategy": self.strategy,
            "batch": self.contexts.shape[1],
            "budget": self.budget,
        }


@dataclasses.dataclass
class LoadPlan:
    """Frames, sent from the first to the last and over again, with their answers.

    Attributes:
        frames: whole frames; the request id is put in when one is sent.
        kinds: uint8 [frames], which question each belongs to.
        names: what the questions ask.
        answers: payloads of the answers to each frame, by the number of the build that gives them.
    """

    frames: list[bytes]
    kinds: NDArray[np.uint8]
    names: list[dict[str, Any]]
    answers: list[dict[int, bytes]]

    def explain(self, place: int, payload: bytes) -> str:
        """Say what is wrong with an answer that is not the one that was expected."""
        (build,) = struct.unpack_from("<Q", payload)
        known = self.answers[place]
        if build not in known:
            return "wrong: unknown build"
        try:
            found = list(_rows(payload))
            expected = [list(_rows(answer)) for answer in known.values()]
        except (ValueError, struct.error):
            return "wrong: damaged"
        if all(any(row in rows for rows in expected) for row in found) and len(known) > 1:
            return "wrong: builds mixed"
        return "wrong: another draft"

    def save(self, path: Path) -> None:
        """Write the plan to a file."""
        pairs = [
            (place, build, answer)
            for place, answers in enumerate(self.answers)
            for build, answer in answers.items()
        ]
        names = "\n".join("\t".join(map(str, name.values())) for name in self.names)
        np.savez(
            path,
            frames=np.frombuffer(b"".join(self.frames), np.uint8),
            frame_stops=np.cumsum([len(frame) for frame in self.frames]),
            kinds=self.kinds,
            names=np.frombuffer(names.encode(), np.uint8),
            answers=np.frombuffer(b"".join(answer for *_, answer in pairs), np.uint8),
            answer_stops=np.cumsum([len(answer) for *_, answer in pairs], dtype=np.int64),
            answer_frames=np.array([place for place, *_ in pairs], np.int64),
            answer_builds=np.array([build for _, build, _ in pairs], np.uint64),
        )

    @classmethod
    def load(cls, path: Path) -> "LoadPlan":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            frames = list(_cut(arrays["frames"], arrays["frame_stops"]))
            answers: list[dict[int, bytes]] = [{} for _ in frames]
            places, builds = arrays["answer_frames"].tolist(), arrays["answer_builds"].tolist()
            cut = _cut(arrays["answers"], arrays["answer_stops"])
            for place, build, answer in zip(places, builds, cut, strict=True):
                answers[place][build] = answer
            names = [
                {"release": release, "strategy": strategy, "batch": int(batch), "budget": int(budget)}
                for release, strategy, batch, budget in (
                    line.split("\t") for line in arrays["names"].tobytes().decode().split("\n")
                )
            ]
            return cls(frames, arrays["kinds"], names, answers)


def _cut(data: NDArray[np.uint8], stops: NDArray[np.int64]) -> Iterator[bytes]:
    """Yield pieces of an array as bytes."""
    whole, start = data.tobytes(), 0
    for stop in stops.tolist():
        yield whole[start:stop]
        start = stop


def _rows(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield for each draft of an answer its place with its match, and its tree.

    Raises:
        ValueError: the lengths do not fit.
    """
    (batch,) = _BATCH.unpack_from(payload, 16)
    table = np.frombuffer(payload, "<u4", 3 * batch, _TABLE).reshape(3, batch)
    start = _TABLE + table.nbytes
    if start + int(table[0].sum()) != len(payload):
        raise ValueError("an answer that is cut")
    for i, size in enumerate(table[0].tolist()):
        yield bytes([i & 0xFF]) + table[1:, i].tobytes(), payload[start : start + size]
        start += size


def make_plan(
    questions: Sequence[Question],
    stores: Mapping[str, Sequence[Path]],
    backend: Mapping[str, str] | None = None,
) -> LoadPlan:
    """Ask every build of every release in this process, and return what the service must answer.

    Args:
        questions: what is asked; their requests are mixed, in an order that is always the same.
        stores: directories of the builds that may stand behind each release.
        backend: of releases whose entries should be read elsewhere than in the first of the store.
    """
    from draftstore.remote.wire import encode_request
    from draftstore.stores.registry import open_store

    frames: list[bytes] = []
    kinds: list[int] = []
    answers: list[dict[int, bytes]] = []
    for kind, question in enumerate(questions):
        for contexts in question.contexts:
            asked = (question.budget, question.min_prob, question.strategy)
            frames.append(encode_request(0, question.release, contexts, *asked))
            kinds.append(kind)
            answers.append({})
        for path in stores[question.release]:
            store = open_store(path, (backend or {}).get(question.release))
            first = len(answers) - len(question.contexts)
            for place, contexts in enumerate(question.contexts, first):
                build, answer = local_answer(store, question, contexts)
                answers[place][build] = answer
            store.close()
    order = np.random.default_rng(SEED).permutation(len(frames)).tolist()
    return LoadPlan(
        [frames[i] for i in order],
        np.array([kinds[i] for i in order], np.uint8),
        [question.label for question in questions],
        [answers[i] for i in order],
    )


def local_answer(store: Any, question: Question, contexts: NDArray[np.int32]) -> tuple[int, bytes]:
    """Return the number of an open store's build, and the payload that the service must answer from it."""
    from draftstore.remote.wire import HEADER, encode_answer, short_hash
    from draftstore.storage.manifest import manifest_digest

    drafter = store.drafter(question.strategy) if question.strategy else store.drafter()
    build = short_hash(manifest_digest(store.path))
    tokenizer = short_hash(store.manifest.tokenizer.fingerprint)
    batch = drafter.draft_batch(contexts, question.budget, question.min_prob)
    return build, encode_answer(0, build, tokenizer, 0, batch)[HEADER.size :]

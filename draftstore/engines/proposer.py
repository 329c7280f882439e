"""Drafts for the running requests of an engine, in one call per step: failures cost speed, never an answer.

    proposer = Proposer(config, vocab_size=..., tokenizer=..., shape=partial(best_chain, longest=8))
    trees = proposer.propose([DraftRequest(key, ids), ...])        every step, with the whole text of every request

An engine reports no outcomes: what it accepted of a draft follows from the text at the next step. A text without
further requests is forgotten after a while; if it comes back, it is read again.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from operator import index
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.assembly import Assembly, Sources, assemble
from draftstore.drafting.drafter import Session, separated
from draftstore.drafting.growing import GrowingIds
from draftstore.drafting.outcomes import counted, outcomes
from draftstore.drafting.request import SPARE
from draftstore.drafting.together import propose_many
from draftstore.engines.config import EngineConfig
from draftstore.engines.figures import DraftFigures
from draftstore.errors import EngineError
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.trees.tree import DraftTree

LOG = logging.getLogger(__name__)
FORGET_STEPS = 64
"""Steps after which a text without further requests is forgotten."""
MAX_REMEMBERED_TOKENS = 1 << 20
"""Maximum tokens of such texts to keep, including spare room: a session takes about 100 bytes per token."""
LEAST = 2
"""Minimum tokens of an answer that is stored."""
TAIL = 64
"""Last tokens of a known text that are compared at every step."""
WARNING_PAUSE = 60.0
"""Minimum seconds between two warnings."""


class DraftRequest(NamedTuple):
    """A request that wants a draft.

    Attributes:
        key: the engine's identifier of the request.
        ids: int32 [any], its whole text so far: the prompt and all emitted tokens.
        corpus: name of its corpus; empty for the common sources.
        budget: maximum nodes; None: as configured; 0 turns drafts off.
        live: whether to draft from the live store, if there is one, and to append the answer to it.
        prediction: returns the ids, int32 [any], expected after the prompt; called at the first step.
    """

    key: Hashable
    ids: NDArray[np.int32]
    corpus: str = ""
    budget: int | None = None
    live: bool = True
    prediction: Callable[[], ArrayLike] | None = None


class _Text(GrowingIds):
    """A request's text as known to its drafter."""

    def __init__(self, corpus: str, live: bool = True) -> None:
        super().__init__()
        self.session: Session | None = None
        self.sources: list[str] = []
        self.corpus, self.live = corpus, live
        self.remembered = 0  # tokens of the prompt, or already in the live store
        self.tree, self.budget = DraftTree.empty(), 0  # the last draft and its maximum nodes
        self.proposed = DraftTree.empty()  # the same before it was cut
        self.step = 0


class Proposer:
    """Drafts for all requests of an engine; not thread-safe.

    Attributes:
        figures: counts of drafted and accepted tokens.
        texts: remembered texts of requests, by key; read-only.
        budget: maximum nodes of a draft.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine: str,
        vocab_size: int,
        tokenizer: TokenizerIdentity,
        model: str | None = None,
        shape: Callable[[DraftTree], DraftTree] = lambda tree: tree,
    ) -> None:
        """Open all sources."""
        self.budget = config.budget
        self._vocab_size = vocab_size
        self._min_prob, self._shape = config.min_prob, shape
        self.texts: dict[Hashable, _Text] = {}
        self._steps = 0
        self._warned_at = -WARNING_PAUSE
        with ExitStack() as opened:
            self._corpora: Mapping[str, Assembly] = {
                name: opened.enter_context(_open(sources, vocab_size, tokenizer, model))
                for name, sources in {"": config, **config.corpora}.items()
            }
            self._opened = opened.pop_all()
        self._without_live = {name: assembly.without_live() for name, assembly in self._corpora.items()}
        self.figures = DraftFigures(engine)

    @property
    def sources(self) -> str:
        """Description of the sources of drafts, for the log."""
        found = {
            corpus: ", ".join(assembly.labels) or "nothing" for corpus, assembly in self._corpora.items()
        }
        common = found.pop("")
        return "; ".join(
            [f"drafts from {common}", *(f"corpus {name}: {text}" for name, text in found.items())]
        )

    def close(self) -> None:
        """Store remaining answers, and close all stores and connections."""
        self.forget([*self.texts])
        self._opened.close()

    def __len__(self) -> int:
        """Return the number of remembered texts."""
        return len(self.texts)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return a draft for each request, empty if there is none. Never raises."""
        self._steps += 1
        texts, budgets = [], []
        for request in requests:
            text, budget = self._follow(request)
            texts.append(text)
            budgets.append(budget)
        places = [place for place, budget in enumerate(budgets) if budget > 0]
        trees = [DraftTree.empty()] * len(requests)
        found = self._propose_together(
            [texts[place] for place in places], [budgets[place] for place in places]
        )
        for place, tree in zip(places, found, strict=True):
            trees[place] = texts[place].tree = tree
        self._forget_old()
        for text in self.texts.values():
            if self._steps - text.step == 2:  # it has ended, or is waiting
                self._remember(text)
        return trees

    def _forget_old(self) -> None:
        """Forget texts that are gone: after a while, or sooner if they take too much room."""
        if self._steps % 8:
            return
        room = MAX_REMEMBERED_TOKENS
        for key, text in reversed(list(self.texts.items())):
            if text.step < self._steps:
                room -= len(text) + SPARE
                if room < 0 or self._steps - text.step >= FORGET_STEPS:
                    self.forget([key])

    def forget(self, keys: Sequence[Hashable], *, ended: bool = True) -> None:
        """Forget requests that have `ended`, or whose text has changed."""
        for key in keys:
            text = self.texts.pop(key, None)
            if text is not None and ended:
                self._remember(text)

    def complete(self, key: Hashable, ids: ArrayLike) -> None:
        """Set the whole text of a request that has ended, including the tokens of its last step."""
        if (text := self.texts.get(key)) is not None:
            text.put(0, ids)

    def _remember(self, text: _Text) -> None:
        """Append the new part of an answer to the live store of its corpus, if there is one."""
        start = text.remembered
        if text.session is None or not text.live or len(text) - start < LEAST:
            return
        self._corpora[text.corpus].remember(text.ids[:start], text.ids[start:])
        text.remembered = len(text)

    def _follow(self, request: DraftRequest) -> tuple[_Text, int]:
        """Return a request's text, up to date, and the maximum nodes of its draft."""
        try:
            budget = self.budget if request.budget is None else min(self.budget, index(request.budget))
            text = self._text(request)
            known, new = len(text), request.ids[len(text) :]
            text.put(known, new)
            text.step = self._steps
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("no draft for a request", error)
            return _Text(""), 0
        try:
            if known == 0:
                text.remembered = len(new) - 1  # the last token is the first of the answer
                sources = self._sources(request)
                text.session, text.sources = sources.session(new), sources.labels
            elif text.session is not None and len(new):
                self._learn(text, text.session, new)
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("no more drafts for a text", error)
            text.session = None
        text.tree = DraftTree.empty()
        text.budget = 0 if text.session is None else budget
        return text, text.budget

    def _text(self, request: DraftRequest) -> _Text:
        """Return a request's text so far, or a new one if its key now belongs to another text."""
        text = self.texts.get(request.key)
        if text is None or text.corpus != request.corpus or not text.begins(request.ids, TAIL):
            self.forget([request.key])
            text = self.texts[request.key] = _Text(request.corpus, request.live)
        return text

    def _sources(self, request: DraftRequest) -> Assembly:
        if request.corpus not in self._corpora:
            self.figures.add_sources("", {("", "unknown_corpus"): 1})
            raise EngineError(f"no corpus {request.corpus!r:.100}: add it to [corpora] in the settings")
        sources = (self._corpora if request.live else self._without_live)[request.corpus]
        if request.prediction is not None:
            try:
                return sources.predicting(request.prediction())
            except Exception as error:  # noqa: BLE001 (an engine must not end)
                self.failed("a prediction is ignored", error)
        return sources

    def _learn(self, text: _Text, session: Session, new: NDArray[np.int32]) -> None:
        path = text.tree.accepted(new)
        known = len(path) + 1 == len(new)  # otherwise the engine has verified something else
        # The last token is the model's own, even if the draft had it too and the engine has cut it.
        self.figures.add(text.corpus, text.tree, path[: len(new) - 1])
        session.observe(separated(new, self._vocab_size), tree=text.tree if known else None)
        parts = outcomes(session, text.proposed, new) if text.budget > 0 else []
        self.figures.add_sources(text.corpus, counted(text.sources, parts))

    def _propose_together(self, texts: Sequence[_Text], budgets: Sequence[int]) -> list[DraftTree]:
        """Return drafts for texts with a session, proposed together or, if that fails, one by one."""
        # One call, and one wait, for all: the same number of nodes for each, cut to the budgets afterwards.
        sessions: list[Any] = [text.session for text in texts]
        try:
            trees = propose_many(sessions, [self.budget] * len(texts), [self._min_prob] * len(texts))
            for text, tree in zip(texts, trees, strict=True):
                text.proposed = tree
            return [self._shape(tree.prefix(budget)) for tree, budget in zip(trees, budgets, strict=True)]
        except Exception:  # noqa: BLE001 (of one text: the others continue)
            return [self._propose_alone(text, budget) for text, budget in zip(texts, budgets, strict=True)]

    def _propose_alone(self, text: _Text, budget: int) -> DraftTree:
        assert text.session is not None
        try:
            text.proposed = text.session.propose(self.budget, self._min_prob)
            return self._shape(text.proposed.prefix(budget))
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("no more drafts for a text", error)
            text.session = None
            return DraftTree.empty()

    def failed(self, effect: str, error: Exception) -> None:
        """Count a failure, and log at most one per minute."""
        self.figures.failures += 1
        if monotonic() - self._warned_at >= WARNING_PAUSE:
            self._warned_at = monotonic()
            LOG.warning("%s: %s: %s", effect, type(error).__name__, error)


def _open(sources: Sources, vocab_size: int, tokenizer: TokenizerIdentity, model: str | None) -> Assembly:
    assembly = assemble(sources, vocab_size=vocab_size, tokenizer=tokenizer, model=model)
    for part in assembly.parts:
        session = part.drafter.session([0])
        if session.needs_hidden or session.needs_candidates:
            assembly.close()
            wants = "hidden states" if session.needs_hidden else "candidates of the model"
            raise EngineError(
                f"{part.name} ({part.kind}) drafts from {wants}, which engines do not expose: remove it, or "
                f"decode with `draftstore worker`"
            )
    return assembly

"""Drafts for the running requests of an engine, in one call a step: whatever goes wrong costs speed, never an answer.

    proposer = Proposer(config, vocab_size=..., tokenizer=..., shape=partial(best_chain, longest=8))
    trees = proposer.propose([Asked(key, ids), ...])        every step, with the whole text of every request

An engine tells no outcomes: what it made of a draft is seen from the text at the next step. A text that is no longer
asked for is forgotten after a while; one that comes back is read anew.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from operator import index
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.assembly import Assembly, Sources, assemble
from draftstore.drafting.drafter import Session
from draftstore.drafting.mixture import MixtureSession
from draftstore.drafting.request import SPARE
from draftstore.drafting.together import propose_many
from draftstore.engines.config import EngineConfig
from draftstore.engines.figures import DraftFigures
from draftstore.errors import EngineError
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.trees.tree import DraftTree

LOG = logging.getLogger(__name__)
PATIENCE = 64
"""Steps after which a text that is no longer asked for is forgotten."""
REMEMBERED = 1 << 20
"""Tokens of such texts that are remembered at most, with spare room: a session takes about 100 bytes for each."""
TAIL = 64
"""Tokens of a known text that are compared at every step."""
QUIET = 60.0
"""Minimum seconds between two warnings."""


def forget_old(texts: MutableMapping[Any, Any], step: int) -> None:
    """Forget texts that are gone: after a while, and sooner where they hold much.

    Args:
        texts: each with its `size` in tokens, and the last `step` in which it was there; in the order of their coming.
        step: number of this step; in seven of eight nothing is done.
    """
    if step % 8:
        return
    room = REMEMBERED
    for key, text in reversed(list(texts.items())):
        if text.step < step:
            room -= text.size + SPARE
            if room < 0 or step - text.step >= PATIENCE:
                del texts[key]


class Asked(NamedTuple):
    """A request that wants a draft.

    Attributes:
        key: what the engine knows the request by.
        ids: int32 [any], its whole text so far: the prompt, and all tokens that were emitted.
        corpus: name of its corpus; empty for the common sources.
        budget: maximum nodes; None: what is configured. 0 turns drafts off.
    """

    key: Hashable
    ids: NDArray[np.int32]
    corpus: str = ""
    budget: int | None = None


class _Text:
    """A request's text as its drafter knows it.

    Attributes:
        session: its drafts; None where the drafter refused the text.
        size: number of its tokens that the session has observed.
        corpus: name of its corpus.
        tail: its last tokens, by which another text under the same key is noticed.
        tree: the draft of the last step.
        verified: what the engine verifies in its place.
        step: number of the step in which it was asked for last.
    """

    def __init__(self, corpus: str) -> None:
        self.session: Session | None = None
        self.size = 0
        self.corpus = corpus
        self.tail: NDArray[np.int32] = np.empty(0, np.int32)
        self.tree = self.verified = DraftTree.empty()
        self.step = 0


class Proposer:
    """Drafts for all requests of an engine; not for several threads.

    Attributes:
        figures: what was drafted and accepted.
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
        """Open all sources.

        Args:
            config: settings.
            engine: name of the engine, for metrics.
            vocab_size: size of the model's vocabulary.
            tokenizer: tokenizer of the model.
            model: name of the model.
            shape: what of a draft the engine can verify.

        Raises:
            EngineError: a source needs what engines do not hand out.
            DraftstoreError: a source cannot be opened or does not fit, see `draftstore.assembly.assemble`.
        """
        self.budget = config.budget
        self._min_prob, self._shape = config.min_prob, shape
        self._texts: dict[Hashable, _Text] = {}
        self._steps = 0
        self._spoke = -QUIET
        with ExitStack() as opened:
            self._corpora: Mapping[str, Assembly] = {
                name: opened.enter_context(_open(sources, vocab_size, tokenizer, model))
                for name, sources in {"": config.sources, **config.corpora}.items()
            }
            self._opened = opened.pop_all()
        self.figures = DraftFigures(engine)

    @property
    def sources(self) -> str:
        """Where drafts come from, in words for the log."""
        found = {
            corpus: ", ".join(part.label for part in assembly.parts) or "nothing"
            for corpus, assembly in self._corpora.items()
        }
        common = found.pop("")
        return "; ".join(
            [f"drafts from {common}", *(f"corpus {name}: {text}" for name, text in found.items())]
        )

    def close(self) -> None:
        """Close all stores and connections."""
        self._opened.close()

    def __len__(self) -> int:
        """Return the number of texts that are remembered."""
        return len(self._texts)

    def propose(self, asked: Sequence[Asked]) -> list[DraftTree]:
        """Return a draft for each request; empty where there is none. Never raises."""
        self._steps += 1
        texts, budgets = [], []
        for each in asked:
            text, budget = self._follow(each)
            texts.append(text)
            budgets.append(budget)
        places = [place for place, budget in enumerate(budgets) if budget > 0]
        trees = [DraftTree.empty()] * len(asked)
        found = self._ask([texts[place] for place in places], [budgets[place] for place in places])
        for place, tree in zip(places, found, strict=True):
            trees[place] = texts[place].tree = texts[place].verified = tree
        forget_old(self._texts, self._steps)
        return trees

    def forget(self, keys: Sequence[Hashable]) -> None:
        """Forget requests that have ended."""
        for key in keys:
            self._texts.pop(key, None)

    def _follow(self, asked: Asked) -> tuple[_Text, int]:
        """Return a request's text, up to date, and the maximum nodes of its draft."""
        try:
            budget = self.budget if asked.budget is None else min(self.budget, index(asked.budget))
            text, tail = self._text(asked), np.array(asked.ids[-TAIL:])
            text.step, new = self._steps, asked.ids[text.size :]
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("a request gets no draft", error)
            return _Text(""), 0
        try:
            if text.size == 0:
                text.session = self._sources(asked.corpus).session(new)
            elif text.session is not None and len(new):
                self._learn(text, text.session, new)
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("a text gets no more drafts", error)
            text.session = None
        text.size, text.tail = len(asked.ids), tail
        text.tree = text.verified = DraftTree.empty()
        return text, 0 if text.session is None else budget

    def _text(self, asked: Asked) -> _Text:
        """Return a request's text as it was, or a new one where another text has its key now."""
        text = self._texts.get(asked.key)
        if (
            text is None
            or text.corpus != asked.corpus
            or len(asked.ids) < text.size
            or not np.array_equal(asked.ids[text.size - len(text.tail) : text.size], text.tail)
        ):
            text = self._texts[asked.key] = _Text(asked.corpus)
        return text

    def _sources(self, corpus: str) -> Assembly:
        """Return the sources of a corpus.

        Raises:
            EngineError: it is not configured. Its request gets no drafts, above all none of another corpus.
        """
        if corpus not in self._corpora:
            raise EngineError(f"no corpus {corpus!r:.100}: add it to [corpora] in the settings")
        return self._corpora[corpus]

    def _learn(self, text: _Text, session: Session, new: NDArray[np.int32]) -> None:
        """Tell a session what came, and count it."""
        path = text.verified.accepted(new)
        known = len(path) + 1 == len(new)  # else the engine has verified something else
        shares = {}
        if len(text.tree):
            parts = session.proposed if isinstance(session, MixtureSession) else [text.tree]
            names = [part.label for part in self._corpora[text.corpus].parts]
            shares = {name: len(part.accepted(new)) for name, part in zip(names, parts, strict=False)}
        # The last token is the model's own, even where it is one of a draft that the engine has cut.
        self.figures.add(text.corpus, text.verified, path[: len(new) - 1], shares)
        session.observe(new, tree=text.verified if known else None)

    def _ask(self, texts: Sequence[_Text], budgets: Sequence[int]) -> list[DraftTree]:
        """Return the drafts of texts that have a session, asked for together; if that fails, one by one.

        All are asked for as many nodes and then cut, since each number would be a call, and a wait, of its own.
        """
        sessions: list[Any] = [text.session for text in texts]
        try:
            trees = propose_many(sessions, [self.budget] * len(texts), [self._min_prob] * len(texts))
            return [self._shape(tree.prefix(budget)) for tree, budget in zip(trees, budgets, strict=True)]
        except Exception:  # noqa: BLE001 (of one text: the others go on)
            return [self._ask_one(text, budget) for text, budget in zip(texts, budgets, strict=True)]

    def _ask_one(self, text: _Text, budget: int) -> DraftTree:
        assert text.session is not None
        try:
            return self._shape(text.session.propose(self.budget, self._min_prob).prefix(budget))
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("a text gets no more drafts", error)
            text.session = None
            return DraftTree.empty()

    def failed(self, what: str, error: Exception) -> None:
        """Count a failure, and tell of one a minute."""
        self.figures.failures += 1
        if monotonic() - self._spoke >= QUIET:
            self._spoke = monotonic()
            LOG.warning("%s: %s: %s", what, type(error).__name__, error)


def _open(sources: Sources, vocab_size: int, tokenizer: TokenizerIdentity, model: str | None) -> Assembly:
    """Open the sources of a corpus.

    Raises:
        EngineError: one needs what engines do not hand out.
        DraftstoreError: see `draftstore.assembly.assemble`.
    """
    assembly = assemble(sources, vocab_size=vocab_size, tokenizer=tokenizer, model=model)
    for part in assembly.parts:
        session = part.drafter.session([0])
        if session.needs_hidden or session.needs_candidates:
            assembly.close()
            wants = "hidden states" if session.needs_hidden else "candidates of the model"
            raise EngineError(
                f"{part.name} ({part.kind}) drafts from {wants}, which engines do not hand out: leave it out, or "
                "decode with `draftstore worker`"
            )
    return assembly

"""Drafts for the running requests of an engine, in one call per step: failures cost speed, never an answer.

    proposer = Proposer(config, vocab_size=..., tokenizer=..., chain=8)
    slot = proposer.start(ids)                                 once for every text
    batch = proposer.propose(slots, ids, stops, budgets)       every step, with the new ids of all texts

An engine reports no outcomes: what it accepted of a draft follows from the text at the next step. A text without
further requests is forgotten after a while.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from time import monotonic

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.assembly.drafter import Assembly, assemble
from draftstore.assembly.sources import Sources
from draftstore.drafting.request import SPARE
from draftstore.drafting.slots import Slots, enlarged
from draftstore.engines.config import EngineConfig
from draftstore.engines.figures import DraftFigures
from draftstore.engines.load import Load
from draftstore.engines.texts import CORPUS, DRAFTS, PROMPT, REMEMBERED, SIZE, STEP, Texts
from draftstore.errors import EngineError
from draftstore.jit import as_input
from draftstore.live.log import hash_prompt
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.trees.batch import DraftBatch

LOG = logging.getLogger(__name__)
FORGET_STEPS = 64
"""Steps after which a text without further requests is forgotten."""
MAX_REMEMBERED_TOKENS = 1 << 20
"""Maximum tokens of such texts to keep, including spare room: a session takes about 100 bytes per token."""
MAX_LEFT = 1024
"""Maximum forgotten texts whose prompt is known if they come back."""
LEAST = 2
"""Minimum tokens of an answer that is stored."""
NEVER = 1 << 62
"""Stands for the remembered tokens of a text that is not stored."""
WARNING_PAUSE = 60.0
"""Minimum seconds between two warnings."""


class Proposer:
    """Drafts for all requests of an engine; not thread-safe.

    Attributes:
        figures: counts of drafted and accepted tokens.
        texts: remembered texts of requests, by slot; read-only.
        budget: maximum nodes of a draft.
        forgotten: slots of texts that the last step has forgotten.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine: str,
        vocab_size: int,
        tokenizer: TokenizerIdentity,
        model: str | None = None,
        chain: int | None = None,
        fixed_rows: bool = False,
    ) -> None:
        """Open all sources; with `chain`, drafts are the best paths of at most that many nodes.

        With `fixed_rows`, the engine verifies the same number of rows whatever is drafted.
        """
        self.budget = config.budget
        self._vocab_size, self._min_prob = vocab_size, config.min_prob
        self._chain = -1 if chain is None else chain
        self._steps = 0
        self._warned_at = -WARNING_PAUSE
        with ExitStack() as opened:
            self._corpora: Mapping[str, Assembly] = {
                name: opened.enter_context(_open(sources, vocab_size, tokenizer, model))
                for name, sources in {"": config, **config.corpora}.items()
            }
            self._opened = opened.pop_all()
        self._without_live = {name: assembly.without_live() for name, assembly in self._corpora.items()}
        nodes = self.budget if chain is None else chain
        self.figures = DraftFigures(engine, [*self._corpora], nodes)
        self.load: Load | None = None
        self.texts, self._slots, self.forgotten = Texts(nodes, judged=config.adaptive), Slots(), list[int]()
        self._new_texts, self._drafting = False, 0.0
        self._remembers = any(sources.live for sources in (config, *config.corpora.values()))
        self._left: dict[int, int] = {}  # ids of the prompts of texts that an engine may resume, by a hash
        self._labels: NDArray[np.int64] = np.empty((0, 0), np.int64)
        self.propose(*(np.array(each) for each in ([self.start(())], [0], [1], [0])))  # compiles the kernels
        self.forget([0], ended=False)
        self._steps, self.figures.steps[:], self.figures.sources[:] = 0, 0, 0
        if config.adaptive:
            self.texts.chances(as_input(np.zeros(1), np.int64), DraftBatch.empty(1))
            self.figures.load = self.load = Load(fixed_rows=fixed_rows)

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
        self.forget(np.flatnonzero(self.texts.state[SIZE] >= 0).tolist())
        self._opened.close()

    def __len__(self) -> int:
        """Return the number of remembered texts."""
        return len(self.texts)

    def start(
        self,
        ids: ArrayLike,
        corpus: str = "",
        *,
        live: bool = True,
        prediction: Callable[[], ArrayLike] | None = None,
    ) -> int:
        """Start a text and return its slot. Never raises: what cannot be read is a text without drafts.

        Args:
            ids: int32 [any], the prompt and the first token of the answer.
            corpus: name of its corpus; empty for the common sources.
            live: whether to draft from the live store, if there is one, and to append the answer to it.
            prediction: returns the ids, int32 [any], expected after the prompt.
        """
        text, place, labels, prompt_size = np.empty(0, np.int32), 0, list[int](), 0
        try:
            text = as_input(ids, np.int32).reshape(-1)  # type: ignore[arg-type]
            prompt_size = self._prompt_size(text)
            sources = self._sources(corpus, live, prediction)
            slot = sources.join(self._slots, text, prompt_size=prompt_size)
            place, labels = self.figures.corpora.index(corpus), self.figures.places(sources.labels)
            drafts = True
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("no drafts for a text", error)
            slot, drafts = self._slots.join([], ()), False
        self.texts.put(slot, text)
        state, self._new_texts = self.texts.state, True
        state[CORPUS, slot], state[DRAFTS, slot], state[STEP, slot] = place, drafts, self._steps
        state[REMEMBERED, slot] = len(text) - 1 if live and drafts else NEVER
        state[PROMPT, slot] = prompt_size
        self._labels = enlarged(self._labels, state.shape[1], len(labels), fill=-1)
        self._labels[slot] = -1
        self._labels[slot, : len(labels)] = labels
        return slot

    def _prompt_size(self, text: NDArray[np.int32]) -> int:
        """Return the number of ids of a new text's prompt: all but the last, unless an engine has resumed the text."""
        return self._left.pop(hash_prompt(text[:-1]), len(text) - 1) if self._left else len(text) - 1

    def _note(self, slot: int) -> None:
        """Note how long the prompt of a text is that an engine may resume, whose answer is remembered in parts."""
        if self._remembers:
            self._left[hash_prompt(self.texts.ids(slot))] = int(self.texts.state[PROMPT, slot])
            if len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]

    def _sources(self, corpus: str, live: bool, prediction: Callable[[], ArrayLike] | None) -> Assembly:
        if corpus not in self._corpora:
            self.figures.strangers += 1
            raise EngineError(f"no corpus {corpus!r:.100}: add it to [corpora] in the settings")
        sources = (self._corpora if live else self._without_live)[corpus]
        if prediction is not None:
            try:
                return sources.predicting(prediction())
            except Exception as error:  # noqa: BLE001 (an engine must not end)
                self.failed("a prediction is ignored", error)
        return sources

    def propose(
        self,
        slots: NDArray[np.int64],
        ids: NDArray[np.int32],
        stops: NDArray[np.int64],
        budgets: NDArray[np.int64],
        *,
        undisturbed: bool = True,
    ) -> DraftBatch:
        """Return a draft for each text, empty if there is none. Never raises.

        Args:
            slots: int64 [batch], the texts, each at most once.
            ids: int32 [any], the ids of all texts that are new since the last step, one text after another.
            stops: int64 [batch], the end of each text's ids.
            budgets: int64 [batch], maximum nodes, at most those configured; 0 turns drafts off.
            undisturbed: whether the engine has only verified the last step's drafts since then.
        """
        now = self.load.clock() if self.load else 0.0
        self._steps, self.forgotten = self._steps + 1, []
        try:
            slots, ids, stops = as_input(slots, np.int64), as_input(ids, np.int32), as_input(stops, np.int64)
            budgets = np.minimum(budgets, self.budget)
            waiting, regular = self._learn(slots, ids, stops, budgets)
            if self.load is None:
                batch = self._draft(slots, budgets)
            else:
                texts, known, self._new_texts = frozenset(slots.tolist()), not self._new_texts, False
                self.load.measure(texts, len(ids), now, undisturbed=undisturbed and regular and known)
                batch = self._draft_by_load(self.load, slots, budgets)
            for slot in waiting:  # or it has ended
                self._remember(slot)
            if self._steps % 8 == 0:
                self._forget_old()
            if self.load is not None:
                self.load.begin(texts, int(batch.sizes.sum()), self._drafting)
            return batch  # noqa: TRY300 (nothing above may raise either)
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self.failed("no drafts in a step", error)
            return DraftBatch.empty(len(slots))

    def _learn(
        self, slots: NDArray[np.int64], ids: NDArray[np.int32], stops: NDArray[np.int64], budgets: NDArray[np.int64]
    ) -> tuple[list[int], bool]:  # fmt: skip
        """Append new ids, count what became of drafts, set budgets of texts without drafts to 0; see `Texts.follow`."""
        learned, known, ends, waiting, regular = self.texts.follow(
            slots, ids, stops, budgets, self._steps, self._vocab_size, self.figures.steps
        )
        texts = learned.tolist()
        for place, error in self._slots.observe(texts, known, ends).items():
            self._lose(texts[place], error)
            budgets[slots == texts[place]] = 0
        self.figures.count_sources(self._slots, self.texts, self._labels, learned)
        return waiting.tolist(), regular

    def _draft_by_load(self, load: Load, slots: NDArray[np.int64], budgets: NDArray[np.int64]) -> DraftBatch:
        """Draft if that pays, and cut the drafts to the nodes that do."""
        begin, self._drafting = load.clock(), 0.0
        if not load.next_step(len(slots)):
            return self._draft(slots, np.zeros_like(budgets))
        batch = self._draft(slots, budgets)
        self.texts.verify(slots, np.zeros(len(slots), np.int32))
        sizes = load.choose(self.texts.chances(slots, batch), load.clock() - begin)
        self.texts.verify(slots, sizes)
        self._drafting = load.clock() - begin
        return batch._replace(sizes=sizes)

    def _draft(self, slots: NDArray[np.int64], budgets: NDArray[np.int64]) -> DraftBatch:
        # One call, and one wait, for all: the same number of nodes for each, cut to the budgets afterwards.
        if not len(slots):
            return DraftBatch.empty(0)
        texts, nodes = slots.tolist(), [self.budget if budget > 0 else 0 for budget in budgets.tolist()]
        try:
            batch = self._slots.propose(texts, nodes, [self._min_prob] * len(texts))
        except Exception:  # noqa: BLE001 (of one text: the others continue)
            batch = DraftBatch.joined([self._draft_alone(*each) for each in zip(texts, nodes, strict=True)])
        return self.texts.keep(slots, batch, budgets, self._chain)

    def _draft_alone(self, slot: int, budget: int) -> DraftBatch:
        try:
            return self._slots.propose([slot], [budget], [self._min_prob])
        except Exception as error:  # noqa: BLE001 (an engine must not end)
            self._lose(slot, error)
            return DraftBatch.empty(1)

    def _lose(self, slot: int, error: Exception) -> None:
        self.failed("no more drafts for a text", error)
        self.texts.state[DRAFTS, slot], self.texts.state[REMEMBERED, slot] = 0, NEVER

    def _forget_old(self) -> None:
        """Forget texts that are gone: after a while, or sooner if they take too much room."""
        state = self.texts.state
        age = np.where(state[SIZE] >= 0, self._steps - state[STEP], 0)
        away = np.flatnonzero(age)
        away = away[np.argsort(age[away], kind="stable")]
        room = np.cumsum(state[SIZE, away] + SPARE)
        self.forgotten = away[(room > MAX_REMEMBERED_TOKENS) | (age[away] >= FORGET_STEPS)].tolist()
        self.forget(self.forgotten)

    def forget(self, slots: Iterable[int], *, ended: bool = True) -> None:
        """Forget texts that have `ended`, or have changed."""
        for slot in slots:
            if ended:
                self._remember(slot)
                self._note(slot)
            self._slots.leave(slot)
            self.texts.drop(slot)

    def complete(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """Store the answer of a text that has ended; its ids from `start` on include those of the last step."""
        self._remember(slot, np.concatenate([self.texts.ids(slot)[:start], np.array(ids, np.int32)]))

    def _remember(self, slot: int, ids: NDArray[np.int32] | None = None) -> None:
        """Append the new part of an answer to the live store of its corpus, if there is one."""
        text, start = self.texts.ids(slot) if ids is None else ids, int(self.texts.state[REMEMBERED, slot])
        if len(text) - start >= LEAST:
            corpus = self.figures.corpora[self.texts.state[CORPUS, slot]]
            prompt_size = int(self.texts.state[PROMPT, slot])
            self._corpora[corpus].remember(text[:start], text[start:], prompt_size=prompt_size)
            self.texts.state[REMEMBERED, slot] = len(text)

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

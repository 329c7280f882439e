"""One text of a batch: its prompt, its drafts, and its part of a pass."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.budget import trim_together
from draftstore.decoding.loop import Planner, Speculation, Step
from draftstore.drafting.drafter import Drafter, projection_of
from draftstore.drafting.together import propose_many
from draftstore.hf.limits import Limited
from draftstore.hf.pass_shapes import Entry
from draftstore.hf.passes import Rows, Wants
from draftstore.hf.prompts import PromptCandidates
from draftstore.hf.targets import ModelVerdict, row_tokens
from draftstore.hf.texts import GeneratedText
from draftstore.trees.tree import DraftTree


class Member:
    """A text of a batch.

    Attributes:
        generated: the text.
        prompt: int64 [any], its prompt without padding.
        past: its tokens in the pool.
    """

    def __init__(
        self, generated: GeneratedText, drafter: Drafter | None, planner: Planner, min_prob: float = 0.0
    ) -> None:
        """Prepare a text.

        Args:
            generated: the text.
            drafter: proposes drafts; None decodes without.
            planner: chooses how much of a draft is verified; a copy of it is used.
            min_prob: minimum probability of a drafted node.
        """
        self.generated = generated
        self.prompt: NDArray[np.int64] = generated.ids().astype(np.int64)
        self.past = 0
        self.drafting = drafter is not None
        self._drafter, self._planner, self._min_prob = drafter, copy.copy(planner), min_prob
        self._told: PromptCandidates | None = None
        self._speculation: Speculation | None = None
        self._limited: Limited | None = None

    @property
    def first_wants(self) -> Wants:
        """What is needed of its prompt."""
        return Wants(self.generated.chooser.greedy, self.drafting, self.drafting)

    def prompt_candidates(self, vocab_size: int) -> PromptCandidates | None:
        """Return what gathers the candidates at its prompt, the same until that is read."""
        if self.past == 0:
            self._told = PromptCandidates.of(self.prompt, self._drafter, vocab_size)
        return self._told

    def begin(self, rows: Rows, model: Any, room: Callable[[], int]) -> Acceptance:
        """Emit the first token, and start its drafts unless that ends it.

        Args:
            rows: the outputs for the last token of its prompt.
            model: model of transformers.
            room: function to the maximum nodes of a draft.
        """
        text = self.generated
        verdict = ModelVerdict(rows, text.chooser, self.first_wants, projection_of(self._drafter))
        accepted = text.begin(verdict)
        if not text.over:
            session = text.session(self._drafter, verdict, self._told)
            self._told = None
            self._limited = Limited(self._planner, nodes=room, depth=text.depth(model, text.padding + 1))
            self._speculation = Speculation(session, self._limited, text.ends, self._min_prob)
        return accepted

    @property
    def limited(self) -> Limited:
        """Its planner, once its drafts have begun."""
        assert self._limited is not None
        return self._limited

    @property
    def speculation(self) -> Speculation:
        """Its drafts, once they have begun."""
        assert self._speculation is not None
        return self._speculation


class Outcome(NamedTuple):
    """What a step did to one text.

    Attributes:
        member: the text. It has left the batch if it is over or has failed.
        step: its new tokens; None if it failed.
        error: why it failed: its drafter, its logits processors or its stopping criteria raised this.
    """

    member: Member
    step: Step | None
    error: Exception | None = None


class Turn:
    """One text's part of a pass; what fails here ends this text alone.

    Attributes:
        member: the text.
        proposed: what its drafter proposed.
        tree: what of it is verified.
        tokens: int64 [n + 1], token of every row.
    """

    def __init__(self, member: Member) -> None:
        """Begin without a draft."""
        self.member = member
        self.error: Exception | None = None
        self.offer(DraftTree.empty(), DraftTree.empty(), 0)
        self._verdict: ModelVerdict | None = None
        self._accepted: Acceptance | None = None

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Keep an exception for the outcome."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (of this text alone)
            self.error = error

    def offer(self, proposed: DraftTree, tree: DraftTree, vocab_size: int) -> None:
        """Set the draft."""
        self.tokens = row_tokens(self.member.generated.text.ids[-1], tree, vocab_size)
        self.proposed, self.tree = proposed, tree

    def draft_alone(self, vocab_size: int) -> None:
        """Ask for a draft for this text alone."""
        with self._apart():
            proposed = self.member.speculation.propose()
            self.offer(proposed, self.member.limited.trim(proposed), vocab_size)

    def entry(self) -> Entry:
        """Return what the pass reads of the text."""
        return Entry(self.tokens, self.tree, self.member.past, self.member.past)

    @property
    def wants(self) -> Wants:
        """What is needed of the pass."""
        session = self.member.speculation.session
        greedy = self.member.generated.chooser.greedy
        return Wants(greedy, session.needs_candidates, session.needs_hidden)

    def accept(self, rows: Rows) -> None:
        """Take the model's tokens."""
        speculation = self.member.speculation
        projection = projection_of(speculation.session)
        self._verdict = ModelVerdict(rows, self.member.generated.chooser, self.wants, projection)
        if self.error is None:
            with self._apart():
                self._accepted = speculation.accept(self.tree, self._verdict)

    def kept(self) -> Sequence[int]:
        """Return the rows that stay in the pool."""
        return [0, *(node + 1 for node in self._accepted.path)] if self._accepted else []

    def learn(self) -> None:
        """Append the tokens to the text, and tell drafter and planner."""
        accepted, verdict = self._accepted, self._verdict
        if accepted is None or verdict is None:
            return
        self.member.past += len(accepted.path) + 1
        self.member.generated.text.extend(accepted.tokens.tolist())
        with self._apart():
            self.member.speculation.learn(self.proposed, self.tree, verdict, accepted)

    def outcome(self, draft_ns: int, forward_ns: int, accept_ns: int) -> Outcome:
        """Return the outcome, with the text's share of the time; see `Step`."""
        accepted = self._accepted
        if self.error is not None or accepted is None:
            return Outcome(self.member, None, self.error)
        step = Step(self.tree, accepted.path, accepted.tokens, draft_ns, forward_ns, accept_ns)
        return Outcome(self.member, step)


def draft_together(turns: Sequence[Turn], vocab_size: int) -> None:
    """Set the drafts of a pass, asked for together; if that fails, one by one."""
    limits = [turn.member.limited for turn in turns]
    speculations = [turn.member.speculation for turn in turns]
    try:
        proposed = propose_many(
            [speculation.session for speculation in speculations],
            [limited.budget() for limited in limits],
            [speculation.min_prob for speculation in speculations],
        )
        cut = [limited.cut(tree) for limited, tree in zip(limits, proposed, strict=True)]
        trees = trim_together([limited.planner for limited in limits], cut)
        for turn, offered, tree in zip(turns, proposed, trees, strict=True):
            turn.offer(offered, tree, vocab_size)
    except Exception:  # noqa: BLE001 (of one text: the others go on)
        for turn in turns:
            turn.draft_alone(vocab_size)

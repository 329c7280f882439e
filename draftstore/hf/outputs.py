"""The outputs of a forward pass for the texts of a batch, as the decode loop reads them."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Walks, walk_greedily
from draftstore.hf.members import Member
from draftstore.hf.passes import BatchRows
from draftstore.hf.sampling import Draws, together
from draftstore.trees.batch import DraftBatch


class BatchOutputs:
    """What a model says of the drafts of a batch: `draftstore.decoding.loop.Outputs`.

    Greedy texts take the most likely tokens, which are copied with the candidates; sampled texts are drawn together as
    soon as the pass is queued (`draftstore.hf.sampling`); others choose row by row.
    """

    def __init__(self, rows: BatchRows, drafts: DraftBatch, members: Sequence[Member]) -> None:
        self._rows, self._drafts, self._members = rows, drafts, members
        chosen = together([member.sampler for member in members])
        self._drawn = {text: place for place, text in enumerate(chosen)}
        self._draws = self._draw([*chosen]) if chosen else None

    def walks(self) -> Walks:
        """Return what greedy and drawn texts emit."""
        greedy = np.array([member.greedy for member in self._members])
        walks = walk_greedily(self._drafts, self._rows.best()) if greedy.any() else Walks.unknown(len(greedy))
        walks.sizes[~greedy] = 0
        return walks if self._draws is None else self._with_drawn(self._draws, walks)

    def choose(self, text: int, row: int, emitted: Sequence[int]) -> int:
        """Return the token that a text emits at a row; the error of a drawn one whose walk ends there."""
        if self._draws is not None and text in self._drawn:
            raise self._draws.fault(self._drawn[text])
        return self._members[text].choose(self._rows[text].logits(row), emitted)

    def settle(self, taken: Mapping[int, int]) -> None:
        """Undo draws after the tokens that texts have taken."""
        if self._draws is not None:
            for text in taken.keys() & self._drawn.keys():
                self._draws.settle(self._drawn[text], taken[text])

    def candidates(self, text: int) -> NDArray[np.int32]:
        """Return int32 [n + 1, 8], the most likely tokens at each row of a text."""
        return self._rows[text].candidates()

    def hidden(self, texts: Sequence[int], rows: Sequence[int]) -> NDArray[np.float16] | None:
        """Return float16 [texts, hidden_size], the last hidden states at a row of each text."""
        return self._rows.states(texts, rows)

    def _draw(self, texts: Sequence[int]) -> Draws:
        samplers = [sampler for text in texts if (sampler := self._members[text].sampler)]
        firsts = np.array([self._rows[text].own.start for text in texts])
        drafts = self._drafts.part(texts)
        return Draws(
            self._rows[0].whole.logits, firsts, drafts.tokens, drafts.parents, drafts.sizes, samplers
        )

    def _with_drawn(self, draws: Draws, walks: Walks) -> Walks:
        """Return walks with those of drawn texts."""
        rows = zip(walks.tokens.tolist(), walks.nodes.tolist(), walks.sizes.tolist(), strict=True)
        known = [(tokens[:size], nodes[:size]) for tokens, nodes, size in rows]
        trees = self._drafts.trees()
        for text, place in self._drawn.items():
            tokens = draws.tokens(place)
            known[text] = tokens, trees[text].accepted(np.array(tokens, np.int32))
        return Walks.of([tokens for tokens, _ in known], [nodes for _, nodes in known])

"""Other libraries and methods as drafters that know the request: fed with the same texts, prompts and outputs.

What they learn from a request is up to them: arctic-inference and SGLang also draft from earlier outputs.
"""

from array import array
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.ngram import ask_corpus, parents_of
from benchmarks.peers import Chain, as_tree
from draftstore.trees.tree import DraftTree


class AskedSession:
    """A session that is asked in two steps: `ask` takes the time that the system takes, `read` makes a tree of it.

    Attributes:
        text: int32 [capacity], of which the first `size` are prompt and output so far.
        size: length of the text.
    """

    needs_candidates = False
    needs_hidden = False

    def __init__(self, prompt_ids: ArrayLike) -> None:
        """Start from a prompt, and the first token of the output."""
        prompt = np.asarray(prompt_ids, np.int32)
        self.size = len(prompt)
        self.text = np.concatenate([prompt, np.empty(len(prompt) + 2048, np.int32)])

    def ask(self, budget: int) -> Any:
        """Have the system draft at most `budget` nodes."""
        raise NotImplementedError

    def read(self, answer: Any) -> Chain:
        """Return the answer of `ask` as tokens and parents."""
        raise NotImplementedError

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the system's draft; its nodes have no probabilities."""
        return as_tree(self.read(self.ask(budget)))

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Append ids to the text."""
        ids = np.asarray(accepted_ids, np.int32)
        if self.size + len(ids) > len(self.text):
            self.text = np.concatenate([self.text, np.empty(len(self.text) + len(ids), np.int32)])
        self.text[self.size : self.size + len(ids)] = ids
        self.size += len(ids)


class PromptLookup:
    """What followed the first earlier occurrence of the last tokens in the request, as transformers looks it up.

    The rule of `PromptLookupCandidateGenerator` of transformers 5: the longest match, its leftmost occurrence. Its
    default of two tokens is raised to five, which accepts more in code and as much elsewhere.
    """

    longest = 5

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "PromptLookupSession":
        """Start the drafts of one text."""
        return PromptLookupSession(prompt_ids)


class PromptLookupSession(AskedSession):
    """The drafts of `PromptLookup` for one text."""

    def ask(self, budget: int) -> NDArray[np.int32]:
        """Return the tokens after the occurrence."""
        text = self.text[: self.size]
        for n in range(min(PromptLookup.longest, self.size - 1), 0, -1):
            starts = self.size - n  # the last one would be the end itself
            same = text[:starts] == text[starts]
            for place in range(1, n):
                same &= text[place : starts + place] == text[starts + place]
            first = int(same.argmax())
            if same[first]:
                return text[first + n : first + n + budget]
        return text[:0]

    def read(self, answer: NDArray[np.int32]) -> Chain:
        """Return a chain."""
        return answer.tolist(), list(range(-1, len(answer) - 1))


class Arctic:
    """Suffix decoding of arctic-inference: stored texts as finished responses, and the request that asks."""

    depth = 64
    """Tokens of context; the default depth of its trees."""
    options = {"use_tree_spec": True, "max_spec_factor": 64.0, "min_token_prob": 0.0}  # noqa: RUF012 (read only)
    """No limits but the number of nodes: its defaults draft three of them."""

    def __init__(self, cache: Any) -> None:
        """Draft from a cache that holds the texts."""
        self.cache = cache
        self._numbers = count()
        self._active: str | None = None
        self._asked: list[str] = []

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "ArcticSession":
        """Start the drafts of one text; the one before has ended."""
        if self._active is not None:
            self.cache.stop_request(self._active)
        self._active = f"request {next(self._numbers)}"
        self._asked.append(self._active)
        return ArcticSession(self, self._active, prompt_ids)

    def forget(self) -> None:
        """Drop the responses of all requests."""
        if self._active is not None:
            self.cache.stop_request(self._active)
        for name in self._asked:
            self.cache.evict_cached_response(name)
        self._active, self._asked = None, []


class ArcticSession(AskedSession):
    """The drafts of `Arctic` for one text."""

    def __init__(self, arctic: Arctic, name: str, prompt_ids: ArrayLike) -> None:
        """Start a request: the last id is the first of the response."""
        super().__init__(prompt_ids)
        self._arctic, self._name = arctic, name
        arctic.cache.start_request(name, self.text[: self.size - 1])
        arctic.cache.add_active_response(name, self.text[self.size - 1 : self.size])

    def ask(self, budget: int) -> Any:
        """Return the library's draft."""
        context = self.text[max(0, self.size - Arctic.depth) : self.size]
        return self._arctic.cache.speculate(self._name, context, max_spec_tokens=budget, **Arctic.options)

    def read(self, answer: Any) -> Chain:
        """Return tokens and parents."""
        return answer.token_ids, answer.parents

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        """Append ids to text and response."""
        before = self.size
        super().observe(accepted_ids, **feedback)
        self._arctic.cache.add_active_response(self._name, self.text[before : self.size])


class Ngram:
    """SGLang's NGRAM with an external corpus, for drafts of a fixed number of nodes."""

    def __init__(self, corpus: Any, nodes: int) -> None:
        """Draft from a corpus of `benchmarks.ngram`."""
        self.corpus, self.nodes = corpus, nodes
        self._numbers = count()

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "NgramSession":
        """Start the drafts of one text."""
        return NgramSession(self, f"request {next(self._numbers)}", prompt_ids)


class NgramSession(AskedSession):
    """The drafts of `Ngram` for one text, with the attributes of a request of SGLang."""

    def __init__(self, ngram: Ngram, rid: str, prompt_ids: ArrayLike) -> None:
        """Start a request."""
        super().__init__(prompt_ids)
        self._ngram, self.rid = ngram, rid
        self.origin_input_ids_unpadded = array("q", self.text[: self.size].tolist())
        self.output_ids = array("q")

    def ask(self, budget: int) -> Any:  # noqa: ARG002 (the corpus is made for one)
        """Return tokens and mask as SGLang verifies them."""
        return ask_corpus(self._ngram.corpus, [self])

    def read(self, answer: Any) -> Chain:
        """Return the nodes without SGLang's padding, which repeats a token below the root."""
        drafted, mask = answer
        rows = len(drafted)
        above = parents_of(np.asarray(mask).reshape(1, rows, rows).astype(bool))[0].tolist()
        places = {0: -1}
        nodes: dict[tuple[int, int], int] = {}
        for row, token in enumerate(np.asarray(drafted).tolist()[1:], start=1):
            places[row] = nodes.setdefault((places[above[row]], token), len(nodes))
        return [token for _, token in nodes], [parent for parent, _ in nodes]

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        """Append ids to text and output."""
        super().observe(accepted_ids, **feedback)
        self.output_ids.extend(np.asarray(accepted_ids).tolist())

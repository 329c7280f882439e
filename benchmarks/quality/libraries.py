"""Other libraries and methods as drafters with access to the request, given the same texts, prompts and outputs.

What they learn from a request is up to them: arctic-inference and SGLang also draft from earlier outputs. None is a
dependency. arctic-inference compiles its suffix tree on installation, and needs torch only in its build environment;
SGLang's corpus is compiled on first use, even without a GPU:

    echo torch==2.13.0 > constraint.txt
    PIP_CONSTRAINT=constraint.txt pip install --no-deps arctic-inference==0.3.0
    pip install --no-deps sglang==0.5.23 apache-tvm-ffi
    pip install torch==2.13.0 ninja msgspec
"""

import importlib
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.common import Documents
from benchmarks.quality.ngram import ask_corpus, parents_of
from draftstore.trees.tree import DraftTree


def as_tree(tokens: list[int], parents: list[int] | None = None) -> DraftTree:
    """Return a draft whose nodes have no probabilities; without parents it is a chain."""
    above = range(-1, len(tokens) - 1) if parents is None else parents
    levels = np.zeros(len(tokens), np.uint8)
    return DraftTree(np.array(tokens, np.int32), np.array(above, np.int16), levels)


class LibrarySession:
    """The drafts of a library for one text: int32 [any], prompt and output so far."""

    needs_candidates = False
    needs_hidden = False

    def __init__(self, prompt_ids: ArrayLike) -> None:
        """Start from a prompt, and the first token of the output."""
        self.text = np.array(prompt_ids, np.int32)  # a library may refuse what is read-only

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return the library's draft."""
        raise NotImplementedError

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Append ids to the text."""
        self.text = np.concatenate([self.text, np.asarray(accepted_ids, np.int32)])


class PromptLookup:
    """The continuation of the first earlier occurrence of the last tokens in the request, as in transformers.

    The rule of `PromptLookupCandidateGenerator` of transformers 5: the leftmost occurrence of the longest match. Its
    default of two tokens is raised to five, for which more is accepted in code and as much elsewhere.
    """

    longest = 5

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "PromptLookupSession":
        """Start the drafts of one text."""
        return PromptLookupSession(prompt_ids)


class PromptLookupSession(LibrarySession):
    """The drafts of `PromptLookup` for one text."""

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the tokens after the occurrence."""
        text = self.text
        for n in range(min(PromptLookup.longest, len(text) - 1), 0, -1):
            starts = len(text) - n  # the last one would be the end itself
            same = text[:starts] == text[starts]
            for place in range(1, n):
                same &= text[place : starts + place] == text[starts + place]
            first = int(same.argmax())
            if same[first]:
                return as_tree(text[first + n : first + n + budget].tolist())
        return as_tree([])


class Arctic:
    """Suffix decoding of arctic-inference: stored texts as finished responses, and the request itself."""

    depth = 64
    """Tokens of context; the default depth of its trees."""
    options = {"use_tree_spec": True, "max_spec_factor": 64.0, "min_token_prob": 0.0}  # noqa: RUF012 (read only)
    """No limits except the number of nodes: the defaults draft only three."""

    def __init__(self, documents: Documents) -> None:
        """Index documents."""
        self.cache = importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache()
        for i, (start, end) in enumerate(pairwise(documents.offsets.tolist())):
            self.cache.start_request(i, [])
            self.cache.add_active_response(i, documents.tokens[start:end])
            self.cache.stop_request(i)
        self._numbers = count()
        self._requests: list[str] = []

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "ArcticSession":
        """Start the drafts of one text; the previous one has ended."""
        if self._requests:
            self.cache.stop_request(self._requests[-1])
        self._requests.append(f"request {next(self._numbers)}")
        return ArcticSession(self, self._requests[-1], prompt_ids)

    def forget(self) -> None:
        """Drop the responses of all requests."""
        if self._requests:
            self.cache.stop_request(self._requests[-1])
        for name in self._requests:
            self.cache.evict_cached_response(name)
        self._requests = []


class ArcticSession(LibrarySession):
    """The drafts of `Arctic` for one text."""

    def __init__(self, arctic: Arctic, name: str, prompt_ids: ArrayLike) -> None:
        """Start a request: the last id is the first of the response."""
        super().__init__(prompt_ids)
        self._cache, self._name = arctic.cache, name
        self._cache.start_request(name, self.text[:-1])
        self._cache.add_active_response(name, self.text[-1:])

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the library's draft."""
        context = self.text[-Arctic.depth :]
        draft = self._cache.speculate(self._name, context, max_spec_tokens=budget, **Arctic.options)
        return as_tree(draft.token_ids, draft.parents)

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        """Append ids to text and response."""
        super().observe(accepted_ids, **feedback)
        self._cache.add_active_response(self._name, np.array(accepted_ids, np.int32))


class Ngram:
    """SGLang's NGRAM with an external corpus of `benchmarks.quality.ngram`, made for drafts of so many nodes."""

    def __init__(self, corpus: Any) -> None:
        """Draft from a corpus."""
        self.corpus = corpus
        self._numbers = count()

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "NgramSession":
        """Start the drafts of one text."""
        return NgramSession(self, f"request {next(self._numbers)}", prompt_ids)


class NgramSession(LibrarySession):
    """The drafts of `Ngram` for one text, with the attributes of a request of SGLang."""

    def __init__(self, ngram: Ngram, rid: str, prompt_ids: ArrayLike) -> None:
        """Start a request."""
        super().__init__(prompt_ids)
        self._corpus, self.rid = ngram.corpus, rid
        self.origin_input_ids_unpadded: list[int] = self.text.tolist()
        self.output_ids: list[int] = []

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the nodes without SGLang's padding, which repeats a token below the root."""
        drafted, mask = ask_corpus(self._corpus, [self])
        rows = len(drafted)
        above: NDArray[np.int64] = parents_of(np.asarray(mask).reshape(1, rows, rows).astype(bool))[0]
        places = {0: -1}
        nodes: dict[tuple[int, int], int] = {}
        for row, token in enumerate(np.asarray(drafted).tolist()[1:], start=1):
            places[row] = nodes.setdefault((places[int(above[row])], token), len(nodes))
        return as_tree([token for _, token in nodes], [parent for parent, _ in nodes])

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        """Append ids to text and output."""
        super().observe(accepted_ids, **feedback)
        self.output_ids.extend(np.asarray(accepted_ids).tolist())

"""Answers in JSON and calls of functions: the next tokens that a form allows, and those that it forces, as drafts.

    grammars = Grammars(tokenizer, vocab_size, ends)
    grammar = grammars.compiled(Form({"type": "object", ...}))
    state = grammar.start()
    state.extend(tokens)                                     of the answer, as they come
    state.allowed(), state.forced()

The package llguidance reads schemas and follows grammars. JSON is compact, without whitespace between its parts, so
names of properties and most punctuation are forced and cost no extra passes. Calls are written as in
`draftstore.text.tools`, with the blanks that models and templates write there.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import check_budget
from draftstore.errors import GrammarError, needs_extra
from draftstore.text.digests import CALL, CALL_END
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tools import call_parts
from draftstore.trees.frontier import BUDGET, MAX_DEPTH
from draftstore.trees.tree import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_SCHEMA = 1 << 18
"""Maximum characters of a schema."""
MAX_OPTIONAL = 500
"""Maximum optional properties of a schema: llguidance fails above, after a time that grows with their square."""
MAX_CALLS = 16
"""Maximum calls of an answer: small models repeat themselves."""
STACK = 512 << 20
"""Bytes of stack for compiling a schema, which llguidance does recursively: a small stack would crash the process."""
VALUES = ("enum", "const", "default", "examples")
"""Parts of a schema that are no schemas."""
_STARTING = threading.Lock()
OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
CALL_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True)
class Form:
    """What an answer must be: JSON that follows a schema, calls of functions, or one of both.

    Attributes:
        schema: of the JSON; None: calls alone.
        functions: JSON schemas of the arguments, by name; a schema of None: no arguments.
        several: whether an answer may call more than once.
    """

    schema: Mapping[str, Any] | None = None
    functions: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    several: bool = False

    def parts(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the schemas with the names of the functions; that of the JSON, which is first, has none."""
        own = [] if self.schema is None else [("", self.schema)]
        calls = self.functions.items()
        return own + [
            (name, NO_ARGUMENTS if schema is None else {**schema, **ANY_OBJECT}) for name, schema in calls
        ]

    def lark(self, tokenizer: TextTokenizer) -> str:
        """Return the grammar of calls, and of JSON if it has a schema, in llguidance's form of Lark."""
        rules, calls, answers = list[str](), list[str](), list[str]()
        begin, end = (_tag(tokenizer, tag) for tag in (CALL, CALL_END))
        for number, (name, schema) in enumerate(self.parts()):
            options = CALL_OPTIONS if name else OPTIONS
            rules.append(f"json_{number}: %json {json.dumps({**schema, 'x-guidance': options})}")
            if name:
                before, after = (json.dumps(each) for each in call_parts(name))
                calls.append(f"{begin} {before} json_{number} {after} {end}")
            else:
                answers.append(f"json_{number}")
        answers.append(f'call ("\\n" call){{0,{MAX_CALLS - 1}}}' if self.several else "call")
        return "\n".join([f"start: {' | '.join(answers)}", f"call: {' | '.join(calls)}", *rules])


def _tag(tokenizer: TextTokenizer, tag: str) -> str:
    """Return a tag in a grammar: as a token if it is one with a text, since llguidance would spell that."""
    ids = tokenizer.encode(tag, bos=False).tolist()
    is_token = len(ids) == 1 and ids[0] not in tokenizer.special_ids
    return f"<[{ids[0]}]>" if is_token else json.dumps(tag)


class Grammars:
    """The grammars of one model; threads may share it."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        """Compile for a tokenizer, logits of `vocab_size` ids, and the ids that end an answer."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = frozenset(end for end in ends if end < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    @property
    def busy(self) -> bool:
        """Whether a thread is compiling: Python cannot end before it without a crash."""
        return self._lock.locked()

    def compiled(self, form: Form) -> "Grammar":
        """Return the grammar of a form; the first call takes seconds to read the vocabulary.

        GrammarError if a schema is invalid or has unsupported parts, or the model has no token that ends an answer.
        """
        return self.compiling(form).result()

    def compiling(self, form: Form) -> "Future[Grammar]":
        """Return the future result of `compiled`: threads compile one at a time, and no end of a process waits."""
        found: Future[Grammar] = Future()
        with _STARTING:
            before = threading.stack_size(STACK)
            threading.Thread(target=self._settle, args=(found, form), daemon=True).start()
            threading.stack_size(before)
        return found

    def _settle(self, found: "Future[Grammar]", form: Form) -> None:
        with self._lock:
            if not found.set_running_or_notify_cancel():
                return
            try:
                self._check(form)
                found.set_result(self._compile(form))
            except (ValueError, RecursionError) as error:
                found.set_exception(GrammarError(str(error)))
            except Exception as error:  # noqa: BLE001 (raised to the caller)
                found.set_exception(error)

    def _check(self, form: Form) -> None:
        """GrammarError if the schemas are too large, or no token ends an answer."""
        if not self._ends:
            raise GrammarError("this model has no token that ends an answer")
        schemas = [schema for _, schema in form.parts()]
        if (size := len(json.dumps(schemas))) > MAX_SCHEMA:
            raise GrammarError(f"a schema of {size:,} characters: expected at most {MAX_SCHEMA:,}")
        if (optional := _optional(schemas)) > MAX_OPTIONAL:
            raise GrammarError(
                f"{optional:,} optional properties: expected at most {MAX_OPTIONAL:,}, required ones do not count"
            )

    def _compile(self, form: Form) -> "Grammar":
        with needs_extra("llguidance", "hf"):
            from llguidance import LLMatcher, LLTokenizer
        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(
                self._tokenizer.serialized, n_vocab=self._vocab_size, eos_token=list(self._ends)
            )
        if form.functions:
            grammar = LLMatcher.grammar_from_lark(form.lark(self._tokenizer))
        else:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(form.schema), overrides=OPTIONS)
        found = Grammar(LLMatcher(self._vocabulary, grammar, log_level=0), self._vocab_size, self._ends)
        found.start().allowed()  # some errors occur only here
        return found


class Grammar:
    """A compiled grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends

    def start(self) -> "GrammarState":
        """Return the state of an empty answer."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._ends)


class GrammarState:
    """The state of one answer in its grammar; as a `Session`, it drafts the forced tokens."""

    needs_candidates = needs_hidden = False

    def __init__(self, matcher: "LLMatcher", vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the answer; GrammarError if the grammar does not allow them, or is too complex."""
        self._matcher.consume_tokens([token for token in tokens if token not in self._ends])
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason, *_listing = re.split(r"<state>|\n +1 \| ", self._matcher.get_error())
            raise GrammarError(f"this schema cannot be followed: {' '.join(reason.split())[:300]}")

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool [vocab_size], whether each token may follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)

    def forced(self) -> list[int]:
        """Return the tokens that must follow, except the last one if more text may change it."""
        return list(self._matcher.compute_ff_tokens())

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return the forced tokens as a chain; see `Session`."""
        most = min(budget, MAX_DEPTH) if check_budget(budget, min_prob) >= 0 else 0
        tokens = np.array(self.forced()[:most], np.int32)
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int16)
        return DraftTree(tokens, parents, np.zeros(len(tokens), np.uint8))

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Append ids to the answer."""
        self.extend(np.asarray(accepted_ids).tolist())


class GrammarDrafter:
    """A drafter of the tokens that a grammar forces, for one answer after `prompt_size` tokens."""

    def __init__(self, grammar: Grammar, prompt_size: int) -> None:
        self._grammar, self._prompt_size = grammar, prompt_size

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> GrammarState:
        """Start the drafts of the answer; see `Drafter.session`."""
        state = self._grammar.start()
        state.observe(np.asarray(prompt_ids)[self._prompt_size :])
        return state


def _optional(part: Any) -> int:
    """Return the number of optional properties in part of a schema."""
    if isinstance(part, list):
        return sum(map(_optional, part))
    if not isinstance(part, dict):
        return 0
    properties, required = part.get("properties"), part.get("required")
    known = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    own = len(properties.keys() - known) if isinstance(properties, dict) else 0
    return own + sum(_optional(each) for name, each in part.items() if name not in VALUES)

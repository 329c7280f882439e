"""Sampling: the tokens of all sampled texts of a pass, drawn on the device, level by level.

The walk down a draft tree (`draftstore.decoding.acceptance`) draws one token at each visited node, and the token says
which node is next. If the host follows, it waits for the device at every node of every text. Here the device follows:

    level 0   the roots of all texts     processors, softmax, a draw for each text, the child that carries the token
    level 1   the nodes reached          the same
    ...
    then      one copy of all tokens to the host

The host cannot know where a walk ends without waiting, so every text draws down to the deepest level of its tree. Each
draws from its own generator the numbers that plain `generate` would draw, in the same order, and `Draws.settle` undoes
draws that the text has not used: the text and the generator are as if drawn node by node. `torch.multinomial` returns
for one sample the argmax of probabilities divided by exponential noise; so does this, for the rows of several texts.

On a CPU nothing waits, and texts are drawn node by node: tensors of a few numbers take longer there than the host, and
several rows at once are slow on busy cores, where the threads that share them wait for each other.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from draftstore.errors import DecodingError, ProbabilityError
from draftstore.jit import as_input, kernel

OF_SCORES = (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that look at scores alone, row by row, and read no value on the host."""
ENDED, FAULT = -1, -2
"""Instead of a token: the walk has ended before; less the row, that this row gives no probabilities."""


class Sampler(NamedTuple):
    """How a text draws tokens.

    Attributes:
        processors: its logits processors.
        generator: its random numbers.
        recipe: equal for texts whose processors do the same to scores; None: its tokens are drawn node by node.
    """

    processors: Sequence[Any]
    generator: torch.Generator
    recipe: tuple[Any, ...] | None

    @classmethod
    def of(
        cls, processors: Sequence[Any], generator: torch.Generator | None, device: torch.device
    ) -> "Sampler":
        """Return the sampler of a text on a device; None is torch's own generator."""
        recipe = _recipe(processors) if has_queue(device) else None
        if generator is None:
            on_gpu = device.type == "cuda"
            generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        return cls(processors, generator, recipe)


def has_queue(device: torch.device) -> bool:
    """Return whether a device works through a queue, so that the host waits to read a value."""
    return device.type == "cuda"


def together(samplers: Sequence[Sampler | None]) -> dict[int, Sampler]:
    """Return the samplers of the texts that `Draws` can draw, by number; None is a text that does not sample.

    Not those that share a generator: it gives its numbers to one text after the other.
    """
    users = Counter(id(each.generator) for each in samplers if each is not None)
    return {
        text: each
        for text, each in enumerate(samplers)
        if each is not None and each.recipe is not None and users[id(each.generator)] == 1
    }


class Draws:
    """The tokens drawn for sampled texts in one pass; valid until the next one."""

    def __init__(
        self,
        logits: torch.Tensor,
        firsts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        parents: NDArray[np.int16],
        sizes: NDArray[np.int32],
        samplers: Sequence[Sampler],
    ) -> None:
        """Queue all draws, without waiting.

        Args:
            logits: [rows, vocabulary], raw, of the whole pass.
            firsts: int64 [texts], the first row of each text, its root.
            tokens: int32 [texts, any], its tree.
            parents: int16 [texts, any], -1 for the root.
            sizes: int32 [texts], nodes of the tree.
            samplers: of each text, all in `together`.
        """
        self._logits, self._samplers = logits, samplers
        self._before: list[list[Any]] = [[] for _ in samplers]
        self._found: list[tuple[list[int], torch.Tensor]] = []
        self._tokens: list[list[int]] = []
        trees, levels = _pack(
            as_input(firsts, np.int64),
            as_input(tokens, np.int32),
            as_input(parents, np.int16),
            as_input(sizes, np.int32),
        )
        groups: dict[Any, list[int]] = {}
        for text in np.argsort(-levels, kind="stable").tolist():
            key = samplers[text].recipe, samplers[text].generator.device
            groups.setdefault(key, []).append(text)
        sent = _sent(trees[[text for group in groups.values() for text in group]], logits.device)
        for group, own in zip(groups.values(), torch.split(sent, [*map(len, groups.values())]), strict=True):
            self._walk(group, own, levels[group])

    def tokens(self, text: int) -> list[int]:
        """Return the tokens that a text emits if nothing else ends it; the first call waits for those of all texts.

        These are the tokens of accepted nodes and the one that leaves the tree, unless the walk comes to a row without
        probabilities: then `fault` is the error after the last token.
        """
        return [token for token in self._fetch()[text] if token >= 0]

    def fault(self, text: int) -> Exception:
        """Return the error of a text at the row after its last token."""
        row = FAULT - self._fetch()[text][-1]
        return fault_of(self._logits[row : row + 1])

    def settle(self, text: int, used: int) -> None:
        """Leave a text's generator as after its first `used` draws; call it once."""
        if used < len(self._before[text]):
            _go_to(self._samplers[text].generator, self._before[text][used])

    def _walk(self, texts: list[int], trees: torch.Tensor, levels: NDArray[np.int64]) -> None:
        """Draw for texts with one recipe, in descending order of their levels; see `_pack` for the trees."""
        firsts, tokens, above = trees[:, 0], *trees[:, 1:].chunk(2, 1)
        nodes, numbers = torch.zeros_like(firsts), torch.arange(1, tokens.shape[1] + 1, device=trees.device)
        for level in itertools.count(1):
            drawn = self._draw(texts, firsts + nodes.clamp(min=0)).masked_fill(nodes < 0, ENDED)
            self._found.append((texts, drawn))
            left = np.count_nonzero(levels > level)
            if left == 0:
                return
            texts, firsts, tokens, above = texts[:left], firsts[:left], tokens[:left], above[:left]
            children = (tokens == drawn[:left, None]) & (above == nodes[:left, None])
            nodes = numbers.masked_fill(~children, ENDED).amax(1)

    def _draw(self, texts: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Return int64 [texts], the tokens drawn at some rows, or FAULT less the row."""
        samplers = [self._samplers[text] for text in texts]
        scores = self._logits.index_select(0, rows).to(samplers[0].generator.device, torch.float32)
        for processor in samplers[0].processors:
            scores = processor(None, scores)
        probs = torch.nn.functional.softmax(scores, dim=-1)
        noise = torch.empty_like(probs)
        for text, sampler, own in zip(texts, samplers, noise, strict=True):
            self._before[text].append(_place(sampler.generator))
            own.exponential_(generator=sampler.generator)
        drawn = torch.div(probs, noise, out=noise).argmax(-1)
        return torch.where(probs[:, 0].isnan().to(rows.device), FAULT - rows, drawn.to(rows.device))

    def _fetch(self) -> list[list[int]]:
        """Return for each text its tokens, and what `_draw` gave instead of one."""
        if not self._tokens:
            self._tokens = [[] for _ in self._samplers]
            values = torch.cat([drawn for _, drawn in self._found]).cpu().tolist()
            for text, value in zip((text for texts, _ in self._found for text in texts), values, strict=True):
                if value != ENDED:
                    self._tokens[text].append(value)
        return self._tokens


def fault_of(logits: torch.Tensor) -> Exception:
    """Return the error of raw logits, [1, vocabulary], of which a text's processors leave no probabilities."""
    if torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float32)[0, 0].isnan():
        return DecodingError("the model's logits are not finite: load it with another dtype")
    return ProbabilityError(
        "the settings leave no finite probabilities: use milder penalties, biases or a higher temperature"
    )


def _recipe(processors: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the classes and settings of processors; None if they look at more than scores."""
    if not all(type(each) in OF_SCORES for each in processors):
        return None
    settings = tuple((type(each), *sorted(vars(each).items())) for each in processors)
    plain = all(isinstance(value, (int, float, type(None))) for _, *own in settings for _, value in own)
    return settings if plain else None


def _place(generator: torch.Generator) -> Any:
    """Return where a generator is in its random numbers."""
    return generator.get_offset() if generator.device.type == "cuda" else generator.get_state()


def _go_to(generator: torch.Generator, place: Any) -> None:
    if generator.device.type == "cuda":
        generator.set_offset(place)
    else:
        generator.set_state(place)


def _sent(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@kernel
def _pack(
    firsts: NDArray[np.int64], tokens: NDArray[np.int32], parents: NDArray[np.int16], sizes: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return int64 [texts, 1 + 2 x any] and int64 [texts]: the trees with nodes counted from 1, and their levels.

    A tree is its first row, its tokens, and the parents, 0 for the root and -2 for no node. The root is a level.
    """
    texts, width = tokens.shape
    trees, levels = np.zeros((texts, 1 + 2 * width), np.int64), np.zeros(texts, np.int64)
    depths = np.zeros(1 + width, np.int64)
    for text in range(texts):
        trees[text, 0] = firsts[text]
        trees[text, 1 + width :] = -2
        for node in range(sizes[text]):
            above = np.int64(parents[text, node]) + 1
            trees[text, 1 + node], trees[text, 1 + width + node] = tokens[text, node], above
            depths[node + 1] = depths[above] + 1
            levels[text] = max(levels[text], depths[node + 1])
        levels[text] += 1
    return trees, levels

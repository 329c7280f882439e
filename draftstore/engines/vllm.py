"""Drafts inside vLLM: one line in the command that serves a model.

    vllm serve MODEL --speculative-config \
      '{"method": "custom_class", "model": "draftstore.engines.vllm.Drafter", "num_speculative_tokens": 8}'

Settings come from the environment, see `draftstore.engines.config`. vLLM verifies one chain for each text, and gives
its drafter no requests: neither names nor parameters. `Drafter` is what vLLM's V1 runner calls; nothing of vLLM is
imported here.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.assembly import Sources
from draftstore.engines.config import EngineConfig, tokenizer_identity
from draftstore.engines.figures import serve_metrics
from draftstore.engines.proposer import DraftRequest, Proposer
from draftstore.engines.rows import Row, Rows
from draftstore.errors import EngineError
from draftstore.trees.chains import best_chain

LOG = logging.getLogger("vllm.draftstore")  # vLLM shows what loggers below its own write
ENGINE = "vllm"


class Drafter:
    """The drafter of a vLLM engine, a class for its method `custom_class`.

    Attributes:
        proposer: its drafts and their figures; None in processes whose drafts vLLM does not read.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Open all sources."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._longest = _chain_length(vllm_config.speculative_config)
        self._max_model_len = int(model.max_model_len)
        self.proposer: Proposer | None = None
        config = EngineConfig.read()
        _check(config)
        if parallel.rank % (parallel.tensor_parallel_size * parallel.prefill_context_parallel_size):
            return  # every process drafts, and one is read
        self.proposer = Proposer(
            config,
            engine=ENGINE,
            vocab_size=int(model.get_vocab_size()),
            tokenizer=tokenizer_identity(config, model.tokenizer),
            shape=partial(best_chain, longest=self._longest),
        )
        self._rows = Rows(self.proposer.texts)
        LOG.info("%s; chains of at most %d tokens", self.proposer.sources, self._longest)
        if config.metrics is not None:
            port = serve_metrics(
                self.proposer.figures, _own_port(config.metrics, parallel.data_parallel_index)
            )
            LOG.info("metrics of drafts are served on port %d", port)

    def load_model(self, target_model: Any) -> None:
        """Take the model, as vLLM requires; drafts need none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,  # noqa: ARG002 (vLLM passes it)
    ) -> list[list[int]]:
        """Return a chain for each row; empty where there is none. Never raises.

        Args:
            sampled_token_ids: new tokens of each row; none where the prompt is not read to its end.
            num_tokens_no_spec: int32 [at least rows], tokens of each text, the new ones included.
            token_ids_cpu: int32 [at least rows, max_model_len], the texts.
        """
        if self.proposer is not None:
            try:
                return self._propose(self.proposer, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception as error:  # noqa: BLE001 (an engine must not end)
                self.proposer.failed("a step gets no drafts", error)
        return [[] for _ in sampled_token_ids]

    def _propose(
        self, proposer: Proposer, sampled: Sequence[Sequence[int]], sizes: Any, ids: Any
    ) -> list[list[int]]:
        rows = [Row(row, ids[row, : sizes[row]], len(new)) for row, new in enumerate(sampled) if len(new)]
        keys = self._rows.find(rows)
        for key, row in zip(keys, rows, strict=True):
            text = proposer.texts.get(key)
            # The next turn of a conversation begins with the text before, and is no answer.
            if text is not None and len(text) < len(row.before):
                proposer.forget([key])
        trees = proposer.propose(
            [DraftRequest(key, row.ids, budget=self._room(row)) for key, row in zip(keys, rows, strict=True)]
        )
        chains: list[list[int]] = [[] for _ in sampled]
        for row, tree in zip(rows, trees, strict=True):
            chains[row.place] = tree.tokens.tolist()
        return chains

    def _room(self, row: Row) -> int | None:
        """Return how many tokens vLLM verifies at most, where the text is near the longest; else None."""
        room = self._max_model_len - 1 - len(row.ids)
        return None if room >= self._longest else max(room, 0)


def _chain_length(speculative: Any) -> int:
    """Return how long a chain may be."""
    longest = getattr(speculative, "num_speculative_tokens", None)
    if not longest or longest < 1:
        raise EngineError('give "num_speculative_tokens" in --speculative-config, for example 8')
    return int(longest)


def _check(config: EngineConfig) -> None:
    """Refuse settings that come to nothing here."""
    if config.corpora:
        raise EngineError(
            "vLLM does not tell its drafter which request a text belongs to, so [corpora.NAME] cannot apply: "
            "remove them, and run an engine for each corpus"
        )
    if config.sources == Sources(request=False):
        raise EngineError(
            "no source of drafts: set DRAFTSTORE_STORES, DRAFTSTORE_RELEASE (with DRAFTSTORE_LOOKUP), or "
            "DRAFTSTORE_REQUEST=true"
        )


def _own_port(address: str | int, index: int) -> str | int:
    """Return where one of several engines of this machine serves metrics: each has the next port."""
    host, colon, digits = str(address).rpartition(":")
    return f"{host}{colon}{int(digits) + index}" if digits.isdecimal() and int(digits) and index else address

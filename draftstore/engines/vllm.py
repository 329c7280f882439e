"""Drafts inside vLLM: one more option in the command that serves a model.

    vllm serve MODEL --speculative-config \
      '{"method": "custom_class", "model": "draftstore.engines.vllm.Drafter", "num_speculative_tokens": 8}'

Settings come from the environment, see `draftstore.engines.config`. vLLM verifies one chain per text, and
passes its drafter no request ids or parameters. vLLM's V1 runner calls `Drafter`; nothing is imported from vLLM.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.assembly.sources import Sources
from draftstore.engines.config import EngineConfig, tokenizer_identity
from draftstore.engines.figures import serve_metrics
from draftstore.engines.proposer import Proposer
from draftstore.engines.texts import Rows
from draftstore.errors import EngineError

LOG = logging.getLogger("vllm.draftstore")  # vLLM shows the output of loggers below its own
ENGINE = "vllm"


class Drafter:
    """The drafter of a vLLM engine, for its method `custom_class`.

    Attributes:
        proposer: provides the drafts and their figures; None in processes whose drafts vLLM does not read.
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
            return  # every process drafts, but vLLM reads only one
        self.proposer = Proposer(
            config,
            engine=ENGINE,
            vocab_size=int(model.get_vocab_size()),
            tokenizer=tokenizer_identity(config, model.tokenizer),
            chain=self._longest,
        )
        self._rows = Rows(self.proposer.texts, self.proposer.start)
        none = np.zeros((1, 1), np.int32)
        self._rows.find(none, none[0], np.zeros(1, np.int64))  # compiles its kernel
        LOG.info("%s; chains of at most %d tokens", self.proposer.sources, self._longest)
        if config.metrics is not None:
            port = serve_metrics(
                self.proposer.figures, _own_port(config.metrics, parallel.data_parallel_index)
            )
            LOG.info("metrics of drafts are served on port %d", port)

    def load_model(self, target_model: Any) -> None:
        """Do nothing: drafts need no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,  # noqa: ARG002 (vLLM passes it)
    ) -> list[list[int]]:
        """Return a chain for each row, empty if there is none. Never raises.

        Args:
            sampled_token_ids: new tokens of each row; empty while its prompt is being read.
            num_tokens_no_spec: int32 [at least rows], number of tokens of each text, including the new ones.
            token_ids_cpu: int32 [at least rows, max_model_len], the texts.
        """
        if self.proposer is not None:
            try:
                return self._propose(self.proposer, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception as error:  # noqa: BLE001 (an engine must not end)
                self.proposer.failed("no drafts in a step", error)
        return [[] for _ in sampled_token_ids]

    def _propose(
        self, proposer: Proposer, sampled: Sequence[Sequence[int]], sizes: Any, ids: Any
    ) -> list[list[int]]:
        counts = np.fromiter(map(len, sampled), np.int64, len(sampled))
        rows, lengths, slots, new, stops = self._rows.find(ids, sizes, counts)
        # Near its maximum length, vLLM verifies fewer tokens of a text.
        room = self._max_model_len - 1 - lengths
        budgets = np.where(room < self._longest, room, proposer.budget)
        batch = proposer.propose(slots, new, stops, budgets, undisturbed=len(rows) == len(counts))
        chains: list[list[int]] = [[] for _ in sampled]
        for row, tokens, size in zip(rows.tolist(), batch.tokens.tolist(), batch.sizes.tolist(), strict=True):
            chains[row] = tokens[:size]
        return chains


def _chain_length(speculative: Any) -> int:
    longest = getattr(speculative, "num_speculative_tokens", None)
    if not longest or longest < 1:
        raise EngineError('set "num_speculative_tokens" in --speculative-config, for example to 8')
    return int(longest)


def _check(config: EngineConfig) -> None:
    """Raise an EngineError for settings that have no effect here."""
    if config.corpora:
        raise EngineError(
            "vLLM does not tell its drafter which request a text belongs to, so [corpora.NAME] cannot apply: "
            "remove these tables, and run an engine for each corpus"
        )
    if Sources.of(config) == Sources(request=False):
        raise EngineError(
            "no source of drafts: set DRAFTSTORE_STORES, DRAFTSTORE_RELEASE (with DRAFTSTORE_LOOKUP), or "
            "DRAFTSTORE_REQUEST=true"
        )


def _own_port(address: str, index: int) -> str:
    """Return the address at which an engine serves metrics: several on one machine use consecutive ports."""
    host, colon, digits = address.rpartition(":")
    return f"{host}{colon}{int(digits) + index}" if digits.isdecimal() and int(digits) and index else address

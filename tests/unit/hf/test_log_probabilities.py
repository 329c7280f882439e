"""Log-probabilities of sampled answers with drafts: those of a plain pass over the whole text, as a trainer's are."""

from typing import Any

import pytest
import torch

from draftstore.decoding.loop import Tally
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.hf import generate
from draftstore.live.recall import RecallDrafter
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore
from tests.fakes.hf_models import tiny

VOCAB, ANSWERS, TOKENS = 64, 12, 40
PROMPT = torch.tensor([[5, 17, 3, 41]])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_rollouts(temperature: float) -> None:
    model: Any = tiny(vocab_size=VOCAB, dtype=torch.float32, spread=0.8)
    store, tally, size = LiveStore(10_000), Tally(), PROMPT.shape[1]
    store.agree(Vocabulary(VOCAB, "0a" * 32))
    sources = [RequestDrafter(VOCAB), store.drafter("sole"), RecallDrafter(store, VOCAB)]
    for seed in range(ANSWERS):
        found: Any = generate(
            model, PROMPT, drafter=Mixture(sources), do_sample=True, temperature=temperature, top_k=0,
            max_new_tokens=TOKENS, seeds=[seed], return_dict_in_generate=True, output_scores=True,
            output_logits=True, on_step=tally.add,
        )  # fmt: skip
        answer = found.sequences[0, size:]
        with torch.no_grad():
            whole = model(found.sequences).logits[0, size - 1 : -1]
        for rows, expected in ((found.logits, whole), (found.scores, whole / temperature)):
            said, scored = (
                torch.log_softmax(each, -1)[range(TOKENS), answer] for each in (torch.cat(rows), expected)
            )
            torch.testing.assert_close(said, scored, rtol=0, atol=1e-4)
        store.append_many(PROMPT[0].numpy(), [answer.numpy()], version=1)
    assert tally.accepted_length > 1.2, "drafts were accepted"

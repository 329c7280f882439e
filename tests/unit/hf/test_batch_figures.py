"""What a batch tells of its passes."""

from typing import Any

import torch

from draftstore.decoding.loop import Fixed
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.batches import Batch
from draftstore.hf.members import Member
from draftstore.hf.texts import prepare_text
from tests.fakes.hf_models import tiny


def member(length: int, drafter: Any = None) -> Member:
    ids = torch.full((1, length), 3)
    text = prepare_text(
        tiny(), ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0
    )
    return Member(text, drafter, Fixed(4))


def test_the_share_of_columns_that_hold_tokens() -> None:
    batch = Batch(tiny(), most=3)

    def after_a_step() -> tuple[int, float] | None:
        batch.step()
        return batch.last_pass

    for length in (10, 4):
        batch.join(member(length))
    assert after_a_step() is None  # it only read prompts
    assert after_a_step() == (2, (11 + 5) / (2 * 11))
    batch.join(member(7, RequestDrafter(64)))
    assert after_a_step() == (2, (12 + 6) / (2 * 12))
    last = after_a_step()
    assert last is not None
    texts, filled = last
    assert texts == 3
    assert (13 + 7 + 8) / (3 * 17) <= filled < 1  # as wide as the third text's draft makes it

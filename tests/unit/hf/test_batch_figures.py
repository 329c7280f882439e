"""What a batch tells of its passes."""

from typing import Any

import pytest
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
    batch: Any = Batch(tiny(), most=3)
    for length in (10, 4):
        batch.join(member(length))
    batch.step()
    assert batch.last_pass is None  # it only read prompts
    batch.step()
    assert batch.last_pass == (2, pytest.approx((11 + 5) / (2 * 11)))
    batch.join(member(7, RequestDrafter(64)))
    batch.step()
    assert batch.last_pass == (2, pytest.approx((12 + 6) / (2 * 12)))
    batch.step()
    texts, filled = batch.last_pass
    assert texts == 3
    assert (13 + 7 + 8) / (3 * 17) <= filled < 1  # as wide as the third text's draft makes it

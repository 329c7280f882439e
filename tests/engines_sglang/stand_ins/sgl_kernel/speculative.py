"""Links of the trees, computed from their masks by our double."""

import torch
from torch import Tensor

from tests.fakes.sglang_engine import links_of


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, verified_seq_len: Tensor, positions: Tensor, retrieve_index: Tensor,
    retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, batch_size: int, draft_token_num: int,
) -> None:  # fmt: skip
    """Write the position, index, first child and next sibling of every node; -1 where there is none.

    `tree_mask` is bool [batch_size x draft_token_num x draft_token_num]: what a node sees, itself and its ancestors.
    """
    rows = draft_token_num
    for text, sees in enumerate(tree_mask.view(-1, rows, rows)[:batch_size].numpy()):
        links, own = links_of(sees), slice(text * rows, (text + 1) * rows)
        positions[own] = verified_seq_len[text] + torch.tensor(links.depths)
        retrieve_index[text] = torch.arange(text * rows, (text + 1) * rows)
        retrieve_next_token[text] = torch.tensor(links.children)
        retrieve_next_sibling[text] = torch.tensor(links.siblings)

"""Links of the trees, from their masks."""

from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write the position, index, first child and next sibling of every node; -1 where there is none.

    `tree_mask` is bool [batch_size x draft_token_num x draft_token_num]: what a node sees, itself and its ancestors.
    """
    rows = draft_token_num
    for text, sees in enumerate(tree_mask.view(-1, rows, rows)[:batch_size].tolist()):
        above = [[other for other in range(node) if sees[node][other]] for node in range(rows)]
        children: dict[int, list[int]] = {}
        for node in range(1, rows):
            children.setdefault(max(above[node], default=-1), []).append(node)
        siblings = {
            node: after
            for parent, family in children.items()
            if parent >= 0
            for node, after in zip(family, family[1:], strict=False)
        }
        for node in range(rows):
            positions[text * rows + node] = verified_seq_len[text] + len(above[node])
            retrieve_index[text, node] = text * rows + node
            retrieve_next_token[text, node] = children.get(node, [-1])[0]
            retrieve_next_sibling[text, node] = siblings.get(node, -1)

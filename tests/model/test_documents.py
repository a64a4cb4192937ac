"""Document boundaries inside a row of tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megazero.model import GPT2Config, GPT2Model
from megazero.model.documents import document_mask, document_positions

EOD = 0


def test_an_end_token_belongs_to_the_document_that_it_ends():
    positions, documents = document_positions(torch.tensor([[5, 6, EOD, 7, EOD, EOD, 8]]), EOD)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, 3]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=3))
def test_positions_and_documents_equal_a_walk_over_the_tokens(rows):
    positions, documents = document_positions(torch.tensor(rows), EOD)
    for row, got_positions, got_documents in zip(rows, positions.tolist(), documents.tolist(), strict=True):
        position = document = 0
        for token, got_position, got_document in zip(row, got_positions, got_documents, strict=True):
            assert (got_position, got_document) == (position, document)
            position += 1
            if token == EOD:
                position, document = 0, document + 1


def test_mask_is_block_diagonal_and_causal():
    mask = document_mask(torch.tensor([[0, 0, 1], [3, 3, 3]]), torch.bfloat16)
    assert mask.shape == (2, 1, 3, 3) and mask.dtype == torch.bfloat16
    assert mask[0, 0].exp().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert mask[1, 0].exp().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_blocks_keep_one_mask_for_their_backward_and_not_one_each(one_rank):
    sizes = {
        "num_layers": 3,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 11,
        "max_position_embeddings": 64,
    }
    config = GPT2Config(**sizes, attention_dropout=0.0)
    ids = torch.arange(64)[None] // 16
    kept: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (1, 1, 64, 64):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = GPT2Model(config)(torch.zeros(1, 64, dtype=torch.int64), document_ids=ids)
    assert len(kept) == 1 and loss.requires_grad

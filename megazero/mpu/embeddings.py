"""Embeddings whose tables are cut over the model-parallel ranks (Megatron-LM, arXiv:1909.08053, sec. 3).

VocabParallelEmbedding    weight [v/t, h]      each rank looks up its own ids; the others contribute zeros
ParallelEmbedding         weight [v, h/t]      each rank looks up its own columns
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.init import xavier_normal_

from megazero.comm import ProcessGroup
from megazero.mpu.init import InitMethod
from megazero.mpu.mappings import gather_from_model_parallel_region
from megazero.mpu.parallel_module import ParallelModule
from megazero.mpu.partition import Partition
from megazero.mpu.sequence_mappings import leave_parallel_region
from megazero.mpu.utils import VocabUtility, check_token_ids


class _SparseGradLookup(torch.autograd.Function):
    """`F.embedding` whose gradient of the table holds the rows that were looked up, and nothing else.

    Rows that were looked up several times are added up in the order of `F.embedding`'s own gradient, so that the sum with
    another, dense gradient of the same table is the same bit for bit, without a table of zeros that is filled and read back.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        unique, place = ids.flatten().unique(return_inverse=True)
        width = ctx.shape[1]
        rows = grad.new_zeros(len(unique), width).index_add_(0, place, grad.reshape(-1, width))
        # torch 2.11 warns where the invariants are not spoken of for all tensors, whatever `check_invariants` says of this one.
        with torch.sparse.check_sparse_tensor_invariants(False):
            return None, torch.sparse_coo_tensor(unique[None], rows, ctx.shape, is_coalesced=True)


class VocabParallelEmbedding(ParallelModule):
    """An embedding with the rows of its table (the vocabulary) cut over the ranks.

    Args:
        num_embeddings: v, ids in the vocabulary.
        embedding_dim: h.
        init_method: fills the full [v, h] table, without padding.
        padded_num_embeddings: rows of the table on all ranks together; rows beyond `num_embeddings` are zero, and no id reads
            them. `num_embeddings` by default.
        sparse_grad: the gradient of the table is sparse, on the CPU. For a table that another layer of the same forward reads
            whole (a tied head): the sum of both gradients is dense, and was made without a second dense table.
        group: ranks to cut over; the model-parallel group by default.
        sequence_parallel: the output is this rank's slice [s/t, ..., h] of the sequence, the first dimension of the ids.

    Raises:
        ValueError: the rows cannot be cut evenly over the ranks, or are fewer than the ids.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = xavier_normal_,
        *,
        padded_num_embeddings: int | None = None,
        sparse_grad: bool = False,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.sparse_grad = sparse_grad
        rows = num_embeddings if padded_num_embeddings is None else padded_num_embeddings
        if rows < num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: padded_num_embeddings={rows} is less than num_embeddings={num_embeddings}. "
                "Leave it out, or pad upwards to a multiple of --model-parallel-size."
            )
        own = self._shard_size("rows of the table (padded vocabulary)", rows)
        self.first_id, self.last_id = VocabUtility.vocab_range_from_per_partition_vocab_size(
            own, self.group.rank(), self.group.size()
        )
        self.weight = nn.Parameter(torch.empty(own, embedding_dim, device=device, dtype=dtype))
        self.partitions["weight"] = Partition(dim=0, full_size=num_embeddings)
        self._init_weight(init_method)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64, the same on every rank -> [..., h], the same on every rank; [s/t, ..., h] with `sequence_parallel`.

        Raises:
            ValueError: an id is outside of the vocabulary. Checked on the CPU only, as a check would make a CUDA device wait:
                whoever reads the data checks it there. Or the sequence does not divide by the number of ranks.
        """
        check_token_ids(ids, self.num_embeddings)
        if self.group.size() == 1:
            return self._look_up(ids)
        foreign = (ids < self.first_id) | (ids >= self.last_id)
        local = (ids - self.first_id).masked_fill(foreign, 0)
        own = self._look_up(local).masked_fill(foreign.unsqueeze(-1), 0.0)
        return leave_parallel_region(own, self.group, self.sequence_parallel)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.sparse_grad and ids.device.type == "cpu":  # on CUDA filling and adding cost next to nothing
            return _SparseGradLookup.apply(ids, self.weight)
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        """The full sizes and the number of ranks."""
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.group.size()}"


class ParallelEmbedding(ParallelModule):
    """An embedding with the columns of its table cut over the ranks, and gathered after the look-up.

    Args:
        num_embeddings: v, ids in the vocabulary.
        embedding_dim: h.
        init_method: fills the full [v, h] table.
        keep_master_weight_for_test: keep the full table as `master_weight`.
        group: ranks to cut over; the model-parallel group by default.

    Raises:
        ValueError: `embedding_dim` is not divisible by the number of ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        columns = self._shard_size("embedding_dim", embedding_dim)
        self.weight = nn.Parameter(torch.empty(num_embeddings, columns, device=device, dtype=dtype))
        self.partitions["weight"] = Partition(dim=1, full_size=embedding_dim)
        self._init_weight(init_method, keep_master_weight_for_test)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64, the same on every rank -> [..., h], the same on every rank.

        Raises:
            ValueError: an id is outside of the vocabulary (checked on the CPU, as in `VocabParallelEmbedding`).
        """
        check_token_ids(ids, self.num_embeddings)
        return gather_from_model_parallel_region(F.embedding(ids, self.weight), self.group)

    def extra_repr(self) -> str:
        """The full sizes and the number of ranks."""
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.group.size()}"

"""GPT-2 with model (tensor) parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.comm import ProcessGroup
from megazero.model.block import Transformer, compiled
from megazero.model.cache import KeyValueCache
from megazero.model.config import GPT2Config
from megazero.model.documents import document_mask
from megazero.model.init import normal_init
from megazero.model.rotary import rotation_of
from megazero.mpu.chunked_loss import chunked_vocab_parallel_loss
from megazero.mpu.groups import group_or_default
from megazero.mpu.init import init_weight_
from megazero.mpu.linear_overlap import column_linear
from megazero.mpu.random import own_stream
from megazero.mpu.utils import check_token_ids


class GPT2Model(nn.Module):
    """GPT-2: learned positions, pre-LN blocks, and a head tied to the word embeddings. Or what else `config` says: a Llama.

    Every rank of `group` holds 1/t of the vocabulary (padded, see `GPT2Config.padded_vocab_size`), of the heads and of the MLPs;
    norms, positions and row-parallel biases are replicated. With `config.sequence_parallel` a rank holds 1/t of the sequence
    wherever it does not hold 1/t of the features. Parameter names are Megatron-LM's. Initial values do not depend
    on the size of `group`.

    Args:
        config: the architecture; `vocab_size` must be set.
        group: the model-parallel group; mpu's own by default.
        device: of the parameters; "meta" makes them without storage.
        dtype: of the parameters and of the computation; torch's default if None. Losses are fp32 in any case.

    Raises:
        ValueError: `config` does not split over the group, or has no `vocab_size`. Raised before any communication.
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        group = group_or_default(group)
        config.check_parallel(group.size())
        where: dict[str, Any] = {"group": group, "device": device, "dtype": dtype}
        table = partial(
            mpu.VocabParallelEmbedding,
            config.require_vocab_size(),
            config.hidden_size,
            init_method=normal_init(config),
            padded_num_embeddings=config.padded_vocab_size(group.size()),
            **where,
        )
        self.word_embeddings = table(
            sparse_grad=not config.untie_embeddings_and_output_weights,  # a tied head always adds a dense gradient
            sequence_parallel=config.sequence_parallel,
        )
        self.position_embeddings: nn.Embedding | None = None
        if config.position_embedding_type == "learned_absolute":
            positions = torch.empty(config.max_position_embeddings, config.hidden_size, device=device, dtype=dtype)
            init_weight_(positions, normal_init(config))
            self.position_embeddings = nn.Embedding.from_pretrained(positions, freeze=False)
        in_slices = config.sequence_parallel and group.size() > 1
        self.transformer = Transformer(replace(config, sequence_parallel=in_slices), **where)
        # The head of an untied model: a table like the embedding's, which the last hidden states are multiplied with.
        self.output_layer = table() if config.untie_embeddings_and_output_weights else None

    @property
    def group(self) -> ProcessGroup:
        """The model-parallel group that the model is split over."""
        return self.word_embeddings.group  # the layers hold it, and know how to be copied with it

    @property
    def _head_weight(self) -> Tensor:
        return (self.word_embeddings if self.output_layer is None else self.output_layer).weight

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        targets: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logit_index: Tensor | None = None,
    ) -> Tensor:
        """Per-token loss [b, s] fp32 if `targets` are given, else this rank's logits [b, s, v_padded/t].

        All arguments are equal on every rank of the model-parallel group.

        Args:
            tokens: [b, s] int64.
            position_ids: [b, s] int64; 0, 1, 2, ... (after what `cache` holds) by default.
            document_ids: [b, s] integers; tokens read only tokens of the same number. None: one document per row, without the
                cost of a mask.
            targets: [b, s] int64, the token to predict at each place. The loss is in nats, not masked and not averaged.
            cache: what earlier calls have read; the keys and values of `tokens` are added, at their positions.
            logit_index: [b] int64; the head is computed for this one place of each row only, and logits are [b, 1, v_padded/t].

        Raises:
            ValueError: more positions than the model has or than fit the cache, or `document_ids` with a cache; or the model is
                sequence-parallel over several ranks, and `tokens` do not divide by their number, or there is a cache.
        """
        s = tokens.size(1)
        first = cache.length if cache is not None else 0
        in_slices = self.transformer.sequence_parallel
        if in_slices and cache is not None:
            raise ValueError(
                "a sequence-parallel model cannot use a cache: generation reads one token at a time, which cannot be cut. Build "
                "the model with sequence_parallel=False; its weights are the same."
            )
        self.config.check_sequence(first + s, self.group.size())
        if position_ids is None:
            position_ids = torch.arange(first, first + s, device=tokens.device)[None]  # [1, s]
        positions: Tensor | None = None
        if self.position_embeddings is not None:
            positions = self.position_embeddings(position_ids.t())  # [s, b or 1, h]
            if in_slices:
                # Before it is added for each of b: the gradient that is gathered is that of the sum.
                positions = mpu.scatter_to_sequence_parallel_region(positions, self.group)
        x = self.word_embeddings(tokens.t())  # [s, b, h], in slices [s/t, b, h] from here to the head
        if positions is not None:
            x = x + positions
        with own_stream(in_slices and self.training and self.config.hidden_dropout > 0.0):
            x = F.dropout(x, self.config.hidden_dropout, self.training)
        x = self._transform(x, position_ids, document_ids, cache)
        if logit_index is not None:
            if in_slices:
                x = mpu.gather_from_sequence_parallel_region(x, False, self.group)
                in_slices = False
            x = x[logit_index, torch.arange(tokens.size(0), device=tokens.device)][None]  # [1, b, h]
        if targets is None:
            return self._logits(x, in_slices).transpose(0, 1)
        return self._loss(x, targets.t(), in_slices).t()

    def _logits(self, x: Tensor, in_slices: bool) -> Tensor:
        """The head, a column-parallel product with the vocabulary's rows as outputs: [s, b, h] -> [s, b, v_padded/t]."""
        return column_linear(x, self._head_weight, None, self.group, sequence_parallel=in_slices)

    def _loss(self, x: Tensor, targets: Tensor, in_slices: bool) -> Tensor:
        """The loss of each token [s, b] in fp32, from the last hidden states [s, b, h] and the next tokens [s, b]."""
        weight, config = self._head_weight, self.config
        where: dict[str, Any] = {"group": self.group, "vocab_size": config.vocab_size}
        if 0 < config.vocab_chunk_size < weight.size(0) or 0 < config.sequence_chunk_size < targets.size(0):
            return chunked_vocab_parallel_loss(
                x,
                weight,
                targets,
                chunk_size=config.vocab_chunk_size or None,
                sequence_chunk_size=config.sequence_chunk_size or None,
                sequence_parallel=in_slices,
                **where,
            )
        loss_of: Callable[..., Tensor] = mpu.vocab_parallel_cross_entropy
        if config.compile:
            check_token_ids(targets, config.require_vocab_size())  # a graph does not
            loss_of = compiled(loss_of)
        return loss_of(self._logits(x, in_slices), targets, **where)

    def _transform(
        self, x: Tensor, position_ids: Tensor, document_ids: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        config, rotation = self.config, None
        if config.position_embedding_type == "rope":
            factor = config.rope_scaling_factor if config.use_rope_scaling else None
            rotation = rotation_of(position_ids, config.head_size, config.rotary_base, x.dtype, factor)
        if cache is None:
            mask = None if document_ids is None else document_mask(document_ids, x.dtype)
            return self.transformer(x, mask, None, rotation)
        if document_ids is not None:
            raise ValueError("document_ids cannot be used with a cache: generate each document as a row of its own.")
        layers, mask = cache.extend(position_ids.expand(x.size(1), -1))  # a token's slot is its position
        return self.transformer(x, mask, layers, rotation)

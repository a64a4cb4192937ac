"""Megatron-LM's library, megatron-core, as a side of the benchmarks, run on a CPU.

It is written for CUDA, where its fused kernels come from Transformer Engine or apex; without them it falls back to modules of its
own and of torch. On a CPU it needs its device to be called "cpu": `on_cpu` changes that word in its sources as they are imported,
and nothing else. Its optimizer is torch's AdamW, fused as on every side, and its attention torch's, through the layer
specification that it has for such choices (its own fallback writes all scores, and is slower).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import CLIP, DECAY, LR, Job, TorchSide
from plain_gpt2 import PlainGPT2, interleaved
from torch import Tensor, nn

DEVICE_WORDS = {
    r"""device=(['"])cuda\1""": "device='cpu'",
    r"""(['"])torch\.cuda\.(\w*Tensor)""": r"\1torch.\2",  # what `tensor.type()` is compared with
    r"(?<!\{)torch\.cuda\.current_device\(\)": "torch.device('cpu')",  # not in an f-string, where quotes would clash
}


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for pattern, replacement in DEVICE_WORDS.items():
            source = re.sub(pattern, replacement, source)
        return self.source_to_code(source.encode(), self.path)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def is_installed() -> bool:
    """Whether megatron-core can be imported here; says so if not."""
    return harness.is_installed("megatron", "pip install --no-deps megatron-core")


def on_cpu() -> None:
    """Has megatron-core's modules imported for a CPU from here on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class Megatron(TorchSide):
    """A model under Megatron's DistributedDataParallel and optimizer, with fp32 gradients and master weights.

    Args:
        tensor_parallel: ranks that each layer is cut over; the others hold copies.
        shards_optimizer: its distributed optimizer: each data-parallel rank updates a part (ZeRO-1). Gradients are reduced
            during backward, and new weights gathered during the next forward.
    """

    autocasts = False

    def __init__(
        self, job: Job, tensor_parallel: int = 1, shards_optimizer: bool = False, sequence_parallel: bool = False
    ) -> None:
        super().__init__(job)
        on_cpu()
        from megatron.core import distributed, optimizer, parallel_state, transformer
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        initialize_rng_tracker(inference_rng_tracker=True)  # without streams of a GPU: there is no dropout
        self.config = transformer.TransformerConfig(
            num_layers=job.layers,
            hidden_size=job.hidden,
            num_attention_heads=job.heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_func=partial(F.gelu, approximate="tanh"),
            tensor_model_parallel_size=tensor_parallel,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            bf16=job.bf16,
            params_dtype=torch.bfloat16 if job.bf16 else torch.float32,
        )
        of_data = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=shards_optimizer,
            use_distributed_optimizer=shards_optimizer,
        )
        model = self.build(job).to(self.config.params_dtype)
        self.model = distributed.DistributedDataParallel(self.config, of_data, model)
        of_update = optimizer.OptimizerConfig(
            lr=LR,
            weight_decay=DECAY,
            clip_grad=CLIP,
            adam_eps=1e-8,
            bf16=job.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=shards_optimizer,
            overlap_param_gather=shards_optimizer,
        )
        self.optimizer = optimizer.get_megatron_optimizer(of_update, [self.model])
        for group in self.optimizer.param_groups:
            # What its schedule would set at each step, and the kernel of every side.
            group.update(weight_decay=DECAY * group["wd_mult"], fused=True)

    def build(self, job: Job) -> nn.Module:
        """The model, in fp32."""
        model = job.model()
        model.config = self.config
        return model

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """As on every side, into gradients that are cleared before."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return super().step(tokens, targets)

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Gradients of all micro-batches but the last stay local."""
        return contextlib.nullcontext() if is_last else self.model.no_sync()

    def update(self) -> None:
        """What is left of the reduction; its optimizer clips by itself."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.model])
        _, self.norm, _ = self.optimizer.step()

    def close(self) -> None:
        """Ends its groups."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


class MegatronGPT2(Megatron):
    """Megatron's own GPT model, with every layer split over all ranks."""

    def __init__(self, job: Job, sequence_parallel: bool = False) -> None:
        super().__init__(job, tensor_parallel=dist.get_world_size(), sequence_parallel=sequence_parallel)

    def build(self, job: Job) -> nn.Module:
        """The model, with this rank's part of the plain model's weights."""
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        layer = get_gpt_layer_local_spec()
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
        layer.submodules.self_attention.submodules.core_attention = _Attention
        model = GPTModel(
            self.config,
            TransformerBlockSubmodules([layer] * job.layers, layer_norm=_Norm),
            vocab_size=job.vocab,
            max_sequence_length=job.seq_length,
            share_embeddings_and_output_weights=True,
        )
        _copy_part(job.model(), model, dist.get_rank(), dist.get_world_size())
        return model

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean of what the model returns for each token."""
        positions = torch.arange(tokens.size(1))[None]
        return self.model(tokens, positions, None, labels=targets).mean()


class _Attention(nn.Module):
    """Causal attention of this rank's heads by torch's kernel."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        """[s, b, n/t, d] each -> [s, b, h/t]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


class _Norm(nn.LayerNorm):
    """torch's, whose parameters say whether their gradients are of a slice of the sequence; Megatron's own refuses slices."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@torch.no_grad()
def _copy_part(plain: PlainGPT2, model: Any, rank: int, size: int) -> None:
    """Gives `model` this rank's part of the plain model's weights; its Q, K and V are stacked head by head."""

    def part(x: Tensor, dim: int = 0) -> Tensor:
        return x.chunk(size, dim)[rank]

    model.embedding.word_embeddings.weight.copy_(part(plain.wte.weight))
    model.embedding.position_embeddings.weight.copy_(plain.wpe.weight)
    pairs: list[tuple[Any, Any]] = [(model.decoder.final_layernorm, plain.ln_f)]
    for theirs, ours in zip(model.decoder.layers, plain.blocks, strict=True):
        pairs += [(theirs.input_layernorm, ours.ln1), (theirs.pre_mlp_layernorm, ours.ln2)]  # type: ignore[union-attr]
        attention, mlp = theirs.self_attention, theirs.mlp
        for name in ("weight", "bias"):
            qkv, up = getattr(ours.qkv, name), getattr(ours.up, name)
            getattr(attention.linear_qkv, name).copy_(part(interleaved(qkv, len(qkv) // 3 // ours.head_dim)))
            getattr(mlp.linear_fc1, name).copy_(part(up))
        for row, whole in ((attention.linear_proj, ours.proj), (mlp.linear_fc2, ours.down)):
            row.weight.copy_(part(whole.weight, 1))
            row.bias.copy_(whole.bias)
    for norm, whole in pairs:
        norm.weight.copy_(whole.weight)
        norm.bias.copy_(whole.bias)

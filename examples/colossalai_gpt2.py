"""Colossal-AI's ZeRO tutorial over megazero: GPT-2 Medium as a Hugging Face model, in such a loop with its imports changed.

pip install transformers
torchrun --nproc_per_node 2 examples/colossalai_gpt2.py                        # GPT-2 Medium
python examples/colossalai_gpt2.py --layers 2 --hidden 64 --seq-len 16 --batch-size 2 --steps 3   # a laptop
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from megazero.comm import leave_distributed
from megazero.compat.colossalai import (
    HybridAdam,
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
    disable_existing_loggers,
    get_current_device,
    get_dist_logger,
    get_mem_info,
    launch_from_torch,
)

VOCABULARY = 50257


class GPTLMModel(nn.Module):
    """Token ids to logits."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        sizes = {"n_layer": args.layers, "n_embd": args.hidden, "n_head": args.hidden // args.head_size}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=args.seq_len, n_ctx=args.seq_len, use_cache=False))
        self.model.gradient_checkpointing_enable()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits [b, s, v]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


class GPTLMLoss(nn.Module):
    """Cross-entropy of each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over all tokens except the first of each sequence."""
        return self.loss_fn(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main(argv: list[str] | None = None) -> list[float]:
    """Trains on random tokens and returns this rank's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 24, "hidden": 1024, "head-size": 64, "seq-len": 1024, "batch-size": 8, "steps": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--policy", default="cpu", choices=("cuda", "cpu", "auto"))
    args = parser.parse_args(argv)

    disable_existing_loggers()
    launch_from_torch(config={})
    logger = get_dist_logger()
    shard_strategy, numel = TensorShardStrategy(), torch.zeros(1, dtype=torch.long)
    logger.info(get_mem_info(), ranks=[0])
    with ZeroInitContext(get_current_device(), shard_strategy, shard_param=True, model_numel_tensor=numel):
        model = GPTLMModel(args)
    logger.info(f"{numel.item():,} parameters", ranks=[0])
    model = ShardedModelV2(model, shard_strategy, tensor_placement_policy=args.policy, reuse_fp16_shard=True)
    logger.info(get_mem_info(prefix="After init model, "), ranks=[0])
    criterion = GPTLMLoss()
    optimizer = ShardedOptimizerV2(model, HybridAdam(model.parameters(), lr=1e-3), initial_scale=2**5)
    logger.info(get_mem_info(prefix="After init optim, "), ranks=[0])

    model.train()
    losses = []
    torch.manual_seed(torch.distributed.get_rank())  # different data on each rank
    for n in range(args.steps):
        start = time.perf_counter()
        input_ids = torch.randint(0, VOCABULARY, (args.batch_size, args.seq_len), device=get_current_device())
        optimizer.zero_grad()
        loss = criterion(model(input_ids, torch.ones_like(input_ids)), input_ids)
        optimizer.backward(loss)
        logger.info(get_mem_info(prefix=f"[{n + 1}/{args.steps}] Backward "), ranks=[0])
        optimizer.step()
        losses.append(loss.item())
        logger.info(f"[{n + 1}/{args.steps}] loss {losses[-1]:.3f}, {time.perf_counter() - start:.2f} s", ranks=[0])
    return losses


if __name__ == "__main__":
    main()
    leave_distributed()

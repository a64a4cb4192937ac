"""Small models that each bring one trap for a sharded engine, and how they are trained under any stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megazero.activation_checkpointing as ours
from megazero import mpu
from megazero.engine import Engine, weight_decay_groups
from megazero.optim.cpu_adam import CPUAdam
from megazero.optim.muon import Muon
from megazero.utils import safe_get_full_grad
from megazero.zero.config import ZeroConfig
from megazero.zero.storage import view_of


class Block(nn.Module):
    """A pre-norm residual block of odd size."""

    def __init__(self, h: int = 5) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(3 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Token ids -> loss: a tied head, three blocks, a parameter that no loss reaches.

    Args:
        picks: the tensor of what a block returns, where that is none itself.
    """

    def __init__(
        self,
        run: str = "plain",
        shared: bool = False,
        block: type[nn.Module] = Block,
        picks: Callable[[Any], Tensor] | None = None,
        vocabulary: int = 11,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 5)
        self.blocks = nn.ModuleList(block(5) for _ in range(3))
        self.norm = nn.LayerNorm(5)
        self.unused = nn.Parameter(torch.ones(3))
        self.run, self.shared, self.picks = run, shared, picks

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.norm(self.hidden(self.embedding(tokens))) @ self.embedding.weight.t()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def hidden(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]] if self.shared else self.blocks:
            x = call(self.run, block, x)
            x = x if self.picks is None else self.picks(x)
        return x


def call(run: str, block: nn.Module, x: Tensor) -> Tensor:
    if run == "plain" or not torch.is_grad_enabled():
        return block(x)
    if run == "ours":
        return ours.checkpoint(block, x)
    if run == "ours, by hooks":
        return ours.non_reentrant_checkpoint(block, x)
    return checkpoint(block, x, use_reentrant=run == "reentrant")


class HalfUsedBlock(Block):
    """A block with a parameter that gets no gradient."""

    def __init__(self, h: int = 5) -> None:
        super().__init__(h)
        self.extra = nn.Linear(h, h)


class NoGradient(torch.autograd.Function):
    """Gives its input no gradient, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class NoGradientBlock(HalfUsedBlock):
    """A block whose extra parameters the backward reaches, without a gradient for them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + NoGradient.apply(self.extra(x))


@dataclass
class Output:
    """What a block may return instead of a tensor."""

    hidden: Tensor
    extras: dict


class OutputBlock(Block):
    """Returns a dataclass that holds a dict with a tuple; the loss flows through the innermost tensor."""

    def forward(self, x: Tensor) -> Output:
        y = super().forward(x)
        return Output(hidden=y.detach(), extras={"pair": (None, y)})


class InPlaceBlock(Block):
    """Adds to its input in place and returns the same object."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(F.gelu(self.up(self.norm(x.clone()))))  # autograd keeps the norm's input
        return x


class InPlaceToy(Toy):
    def __init__(self) -> None:
        super().__init__(block=InPlaceBlock)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(1 * x)


class ViewBlock(Block):
    """Returns what a Linear makes of three dimensions: a view."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class WrittenViewToy(Toy):
    """Writes to what blocks return, and what they return is a view, whose own node then leaves the graph."""

    def __init__(self) -> None:
        super().__init__(block=ViewBlock)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


class Carrying(torch.autograd.Function):
    """x, with which a loss of its own gets a gradient, as a router's does: for autograd a view of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


class CarryingBlock(Block):
    """Has a loss that is computed after the output, and so comes before it in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return Carrying.apply(y, self.up(x).square().mean()).view(y.shape)


class CarryingInputBlock(HalfUsedBlock):
    """Returns nothing but its input, with a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return Carrying.apply(x, self.down(self.up(self.norm(self.extra(x)))).square().mean())


class Mean(torch.autograd.Function):
    """The mean of squares, as a view of a tensor that has no graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean().view(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x / x.numel()


class ViewLossToy(Toy):
    """Reads a scale of a unit that does not run, and returns the loss as a view of a tensor without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList([nn.LayerNorm(5)])

    def forward(self, tokens: Tensor) -> Tensor:
        return Mean.apply(self.hidden(self.embedding(tokens) * self.scales[0].weight))


@dataclass(slots=True)
class SlotOutput:
    hidden: Tensor


class SlotBlock(Block):
    def forward(self, x: Tensor) -> SlotOutput:
        return SlotOutput(super().forward(x))


class CachingBlock(Block):
    """Hands a list on in which every block leaves a tensor, as a key-value cache does."""

    def forward(self, x: Tensor, cache: dict) -> tuple[Tensor, dict]:
        y = super().forward(x)
        cache["seen"].append(2 * y)
        return y, cache


class CachingToy(Toy):
    """The loss reads the cache as well, so that gradients enter the blocks there too."""

    def __init__(self) -> None:
        super().__init__(block=CachingBlock)

    def hidden(self, x: Tensor) -> Tensor:
        cache: dict = {"seen": []}
        for block in self.blocks:
            x, cache = block(x, cache)
        return x + sum(cache["seen"])


class FrozenToy(Toy):
    """Frozen weights between trained ones: their values are needed for the gradient of what lies below."""

    def __init__(self, run: str = "plain") -> None:
        super().__init__(run)
        self.embedding.weight.requires_grad_(False)
        for p in self.blocks[1].parameters():
            p.requires_grad_(False)
        self.blocks[2].down.weight.requires_grad_(False)
        self.blocks[0].up.weight.requires_grad_(False)


class TiedBlocksToy(Toy):
    """Blocks share weights: the second has no other than the first's, the third one of them."""

    def __init__(self, run: str = "plain") -> None:
        super().__init__(run)
        first, second, third = self.blocks
        second.norm, second.up, second.down = first.norm, first.up, nn.Linear(15, 5)
        second.down.weight, second.down.bias = first.down.weight, first.down.bias
        third.up.weight = first.up.weight


class WeightArgumentToy(Toy):
    """Hands each block's weight to torch's checkpoint, which saves it before the block runs."""

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(with_weight, block, x, block.up.weight, use_reentrant=self.run == "reentrant")
        return x


def with_weight(block: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    return block(x) + x @ weight.t() @ weight


class WeightKeepingToy(Toy):
    """Hands each block's weight to a function of its own before the block runs."""

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(Keeping.apply(x, block.up.weight))
        return x


class Keeping(torch.autograd.Function):
    """x, beside a weight to which it gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class EmptyUnitToy(Toy):
    """All that the unit of one block has are parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = EmptyBlock()


class EmptyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum(0)


class Wide(nn.Module):
    """Units of several tiles: blocks of 20,000 elements."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 67)
        layers = (nn.Sequential(nn.Linear(67, 149), nn.Tanh(), nn.Linear(149, 67)) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return (x @ self.embedding.weight.t()).square().mean()


class Mlp(nn.Sequential):
    """OneFlow's example: 256-128-10 on vectors that the token ids choose."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.sin(tokens.flatten()[:, None] * torch.arange(256.0)).to(
            self[0].weight.dtype if self[0].weight.ndim else torch.float32
        )
        return F.cross_entropy(super().forward(x).float(), tokens.flatten() % 10)


def huggingface_gpt2() -> nn.Module:
    """transformers' GPT2LMHeadModel, with its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    model = GPT2LMHeadModel(config)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

    return WithLoss()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied head, unused parameter": Toy,
    "non-reentrant checkpointing": lambda: Toy("nonreentrant"),
    "reentrant checkpointing": lambda: Toy("reentrant"),
    "our checkpointing": lambda: Toy("ours"),
    "block used twice": lambda: Toy(shared=True),
    "block used twice, reentrant": lambda: Toy("reentrant", shared=True),
    "block used twice, non-reentrant": lambda: Toy("nonreentrant", shared=True),
    "unused parameter in every block": lambda: Toy(block=HalfUsedBlock),
    "parameters that get no gradient": lambda: Toy(block=NoGradientBlock),
    "dataclass outputs": lambda: Toy(block=OutputBlock, picks=lambda out: out.extras["pair"][1]),
    "a cache handed on": CachingToy,
    "residual added in place": InPlaceToy,
    "outputs written to that are views": WrittenViewToy,
    "outputs with a loss of their own": lambda: Toy(block=CarryingBlock),
    "inputs handed on with a loss": lambda: Toy(block=CarryingInputBlock),
    "a loss that is a view": ViewLossToy,
    "outputs with slots": lambda: Toy(block=SlotBlock, picks=lambda out: out.hidden),
    "frozen layers": FrozenToy,
    "frozen layers, reentrant": lambda: FrozenToy("reentrant"),
    "frozen layers, non-reentrant": lambda: FrozenToy("nonreentrant"),
    "blocks that share weights": TiedBlocksToy,
    "weights used twice, reentrant": lambda: TiedBlocksToy("reentrant"),
    "weights that a checkpoint is given": WeightArgumentToy,
    "weights used twice, once as an argument of a reentrant checkpoint": lambda: WeightArgumentToy("reentrant"),
    "weights that a function is given": WeightKeepingToy,
    "a unit without elements": EmptyUnitToy,
    "mlp 256-128-10": Mlp,
}
if find_spec("transformers"):
    MODELS["GPT2LMHeadModel"] = huggingface_gpt2

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.9),
    "sgd, no momentum": lambda groups: torch.optim.SGD(groups, lr=1e-3),
    # A key's bias has no gradient but rounding, which a small eps would blow up to a full step.
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True),
    "CPUAdam": lambda groups: CPUAdam(groups, lr=1e-2, eps=1e-3),
    "adamw, not fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3),
    "muon": lambda groups: Muon(groups, lr=1e-2, eps=1e-3, adjust_lr_fn="match_rms_adamw"),
}


def token_batches(steps: int, micro: int, world_size: int) -> Tensor:
    """[steps, micro-batches, ranks, 2, 7] token ids."""
    return torch.randint(0, 11, (steps, micro, world_size, 2, 7), generator=torch.Generator().manual_seed(1))


def my_batch(step: int = 0) -> Tensor:
    """This rank's token ids for one micro-batch of one of three steps."""
    return token_batches(3, 1, mpu.get_data_parallel_world_size())[step, 0, mpu.get_data_parallel_rank()]


# Tiny units share no bucket, so that there are as many as in a large model; or they do, as by default.
APART, SHARING = {"reduce_bucket_size": 1}, {"reduce_bucket_size": ZeroConfig().reduce_bucket_size}


def make_engine(model: nn.Module, stage: int, *, optimizer: str = "adamw", decay: float = 0.1, **options) -> Engine:
    zero = ZeroConfig(stage=stage, **{**APART, **options.pop("zero", {})})
    groups = weight_decay_groups(model, decay, use_muon=optimizer == "muon")
    return Engine(model, mpu.get_groups(), OPTIMIZERS[optimizer], *groups, zero=zero, **options)


def fresh(stage: int, **options) -> Engine:
    """An engine of always the same weights: those of `model`, or of a `Toy` with the arguments `toy`."""
    torch.manual_seed(0)
    return make_engine(options.pop("model", None) or Toy(**options.pop("toy", {})), stage, **options)


def one_step(engine: Engine, batch: Any) -> Tensor:
    """Trains a step on what the model is given, and returns its loss."""
    loss = engine.backward(engine(batch))
    engine.step()
    return loss


def step(engine: Engine, micro: int = 1) -> None:
    """A step of so many micro-batches."""
    for batch in token_batches(1, micro, mpu.get_data_parallel_world_size())[0]:
        one_step(engine, batch[mpu.get_data_parallel_rank()])


def full_grads(engine: Engine) -> dict[str, Tensor]:
    """The mean gradients of all parameters, as `full_grad` gives each, with one gather of each bucket. Collective."""
    engine.optimizer.finish()
    found = {}
    for bucket in engine.buckets:
        if bucket.is_trainable:
            assert bucket.gradient.is_reduced, f"no gradients of {bucket.name} are there"
            with bucket.gradient.at_hand() as owned:
                whole = bucket.whole(owned).float() * (bucket.gradient.to_mean / engine.optimizer.cur_scale)
            found.update({segment.name: view_of(whole, segment) for segment in bucket.trained_segments})
    return found


def trained_names(engine: Engine) -> list[str]:
    return sorted(s.name for b in engine.buckets for s in b.trained_segments)


def full_grad(engine: Engine, name: str) -> Tensor:
    """The mean gradient of one parameter, which has been reduced and not been used. Collective."""
    grad = safe_get_full_grad(engine.module.get_parameter(name))
    assert grad is not None, f"no gradient of {name} is there"
    return grad


def train(engine: Engine, batches: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Trains on `batches` and yields everything there is to compare: losses, norms, all gradients, all weights."""
    rank = mpu.get_data_parallel_rank()
    for index, step in enumerate(batches.to(engine.device)):
        for batch in step:
            loss = engine(batch[rank])
            yield f"loss {index}", loss.detach().clone()
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                yield from ((f"gradient of {name} {index}", grad) for name, grad in full_grads(engine).items())
            engine.step()
        yield f"norm {index}", torch.tensor(engine.get_global_grad_norm())
    for name, value in engine.state_dict().items():
        yield f"weight {name}", value


def run(
    make: Callable[[], nn.Module], stage: int, *, steps: int = 3, micro: int = 1, seed: int = 0, **options
) -> dict[str, Tensor]:
    """The trace of a training from scratch."""
    torch.manual_seed(seed)
    engine = make_engine(make(), stage, gradient_accumulation_steps=micro, **options)
    trace = dict(train(engine, token_batches(steps, micro, mpu.get_data_parallel_world_size())))
    engine.destroy()
    return trace


# The second step trains by moments and weights of the first; a third one would show nothing else.
STEPS = 2


def compare(trace: dict, want: dict, what: str, bitwise: bool, atol: float = 1e-6) -> None:
    """Asserts that two traces, or parts of them, are equal: bit for bit, or nearly."""
    tolerance = {"rtol": 0, "atol": 0} if bitwise else {"rtol": 1e-5, "atol": atol}
    torch.testing.assert_close(trace, want, **tolerance, msg=lambda m: f"{what}: {m}")

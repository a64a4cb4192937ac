"""Learning-rate schedules of the GPT-2 job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megazero.optim.schedule_base import LRSchedule
from megazero.option import check_options, option


@dataclass(frozen=True)
class LRScheduleConfig:
    """Warm-up and decay of the learning rate, counted in iterations (Megatron-LM's AnnealingLR)."""

    lr: float = option(1e-4, "peak learning rate", at_least=0)
    warmup: float = option(
        0.01,
        "fraction of --lr-decay-iters over which the learning rate rises linearly from 0",
        aliases=("--lr-warmup-fraction",),
    )
    lr_warmup_iters: int | None = option(None, "warm-up in iterations; overrides --warmup", at_least=0)
    lr_decay_iters: int | None = option(None, "iterations of the decay (default: --train-iters)", at_least=1)
    lr_decay_style: str = option(
        "linear",
        "shape of the decay; linear and cosine begin behind the warm-up and end as much later than --lr-decay-iters; WSD "
        "(warm-up, stable, decay) ends there; inverse-square-root has no end",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "with WSD: iterations of its decay, the last ones of --lr-decay-iters; before them the rate is --lr",
        at_least=1,
    )
    lr_wsd_decay_style: str = option(
        "exponential", "with WSD: shape of its decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    min_lr: float = option(0.0, "the decay never goes below this: it cuts linear and cosine off, and WSD ends there")

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"--warmup is a fraction of --lr-decay-iters between 0 and 1, got {self.warmup}.")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr must lie between 0 and --lr={self.lr}, got {self.min_lr}.")
        iters = self.lr_wsd_decay_iters
        if (self.lr_decay_style == "WSD") != (iters is not None):
            raise ValueError(
                f"--lr-decay-style is {self.lr_decay_style} and --lr-wsd-decay-iters is {iters or 'not given'}: WSD decays over "
                "that many iterations, and no other style knows them. Give both or neither."
            )
        if self.lr_wsd_decay_style != LRScheduleConfig.lr_wsd_decay_style and iters is None:
            raise ValueError(
                f"--lr-wsd-decay-style {self.lr_wsd_decay_style} is for --lr-decay-style WSD, got {self.lr_decay_style}. Drop it."
            )

    def decay_iters(self, train_iters: int) -> int:
        """Iterations of the decay."""
        return self.lr_decay_iters or train_iters

    def warmup_iters(self, train_iters: int) -> float:
        """Iterations of the warm-up, of which the last may be a part of one."""
        return self.warmup * self.decay_iters(train_iters) if self.lr_warmup_iters is None else self.lr_warmup_iters

    def check_length(self, train_iters: int) -> None:
        """Checks that WSD's decay fits behind the warm-up.

        Raises:
            ValueError: it does not.
        """
        iters, warmup, decay = self.lr_wsd_decay_iters, self.warmup_iters(train_iters), self.decay_iters(train_iters)
        if iters is not None and warmup + iters > decay:
            raise ValueError(
                f"--lr-wsd-decay-iters {iters} and a warm-up of {warmup:g} iterations (--lr-warmup-iters, else --warmup "
                f"{self.warmup} of {decay}) do not fit into {decay} (--lr-decay-iters, else --train-iters). Shorten one of them."
            )


class AnnealingLR(LRSchedule):
    """Sets the learning rate of every parameter group: linear warm-up, then a decay of one of the styles.

    A group's `lr_mult` is a factor on its rate, as in Megatron-LM.

    With n steps taken, w warm-up iterations and e decay iterations (Megatron-LM v0; note that e is not shortened by w):

        n <= w                lr * n / w
        linear                lr * (e - (n - w)) / e
        cosine                lr / 2 * (cos(pi * (n - w) / e) + 1)
        inverse-square-root   lr * sqrt(max(w, 1) / n), of later releases, but without their drop to min_lr behind e

    WSD (warm-up, stable, decay; arXiv:2404.06395) as in Megatron-LM counts e from the run's start. With d iterations of decay and
    x = (n - (e - d)) / d, the part of them that is done:

        n <= e - d   lr
        else         min_lr + (lr - min_lr) * c,    c = 2 * 0.5^x - 1,   1 - x,   (cos(pi * x) + 1) / 2,   1 - sqrt(x)

    for exponential, linear, cosine and minus_sqrt. A checkpoint from before the decay continues with a larger e as if nothing had
    been decided yet.
    """

    def __init__(self, optimizer: Any, config: LRScheduleConfig, train_iters: int) -> None:
        self.config = config
        self.warmup_iters = config.warmup_iters(train_iters)
        self.decay_iters = config.decay_iters(train_iters)
        super().__init__(optimizer)

    def lr_at(self, num_steps: int) -> float:
        """The learning rate after `num_steps` steps."""
        lr, style = self.config.lr, self.config.lr_decay_style
        if self.warmup_iters > 0 and num_steps <= self.warmup_iters:
            return lr * num_steps / self.warmup_iters
        if style == "WSD":
            return self._wsd_at(num_steps)
        done = min(num_steps - self.warmup_iters, self.decay_iters)
        rates = {
            "constant": lr,
            "linear": lr * (self.decay_iters - done) / self.decay_iters,
            "cosine": lr / 2 * (math.cos(math.pi * done / self.decay_iters) + 1),
            "inverse-square-root": lr * math.sqrt(max(self.warmup_iters, 1) / max(num_steps, 1)),
        }
        return max(rates[style], self.config.min_lr)

    def _wsd_at(self, num_steps: int) -> float:
        lr, least, iters = self.config.lr, self.config.min_lr, self.config.lr_wsd_decay_iters
        assert iters is not None  # the configuration was checked
        x = min(max(num_steps - (self.decay_iters - iters), 0) / iters, 1)
        parts = {
            "exponential": 2 * 0.5**x - 1,
            "linear": 1 - x,
            "cosine": (math.cos(math.pi * x) + 1) / 2,
            "minus_sqrt": 1 - math.sqrt(x),
        }
        return least + (lr - least) * parts[self.config.lr_wsd_decay_style]

    def get_lr(self) -> list[float]:
        """The current learning rate of every parameter group."""
        lr = self.lr_at(self.last_batch_iteration + 1)
        return [lr * group.get("lr_mult", 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` needs to continue: the number of steps taken."""
        return {"num_steps": self.last_batch_iteration + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the steps in `state`, under this object's own configuration."""
        super().load_state_dict({"last_batch_iteration": state["num_steps"] - 1})

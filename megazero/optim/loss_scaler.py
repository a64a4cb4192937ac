"""Precision of the parameters and the loss scale that keeps fp16 gradients in range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megazero.logging import ALIKE, counted, get_logger
from megazero.option import check_options, option

logger = get_logger(__name__)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # of parameters, by their names here
MAX_OVERFLOWS_IN_A_ROW = 20  # with a fixed loss scale; one bad batch is skipped, a broken run ends

_CONTINUED = ("scale", "hysteresis_left", "clean_steps")  # what a resumed run continues with


@dataclass(frozen=True)
class DtypeConfig:
    """Dtype of parameters and activations."""

    fp16: bool = option(False, "compute in fp16 (training: with a loss scale)")
    bf16: bool = option(False, "compute in bf16 (training: no loss scale needed)")
    tf32: bool = option(
        False, "run fp32 matrix products on a GPU's tensor cores, with operands rounded to 10 bits of mantissa"
    )

    def __post_init__(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 exclude each other: parameters have one dtype. Drop one of them.")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32


@dataclass(frozen=True)
class PrecisionConfig(DtypeConfig):
    """Precision of training; master weights and Adam's moments are always fp32, gradients by default."""

    loss_scale: float | None = option(None, "static loss scale for --fp16 (default and 0: dynamic)", at_least=0)
    initial_loss_scale: float = option(2.0**16, "first value of the dynamic loss scale", above=0)
    loss_scale_window: float = option(1000, "clean steps after which the dynamic loss scale doubles", above=0)
    min_scale: float = option(
        1.0, "the dynamic loss scale never goes below this", above=0, aliases=("--min-loss-scale",)
    )
    hysteresis: int = option(
        2, "the overflow that halves the dynamic loss scale: those before it are forgiven", above=0
    )
    consecutive_hysteresis: bool = option(
        False, "refill --hysteresis at every clean step, not only at one that doubles the scale"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)
        if self.loss_scale and not self.fp16:
            raise ValueError(f"--loss-scale {self.loss_scale} needs --fp16: fp32 and bf16 gradients are never scaled.")
        if self.fp16 and not self.loss_scale and self.min_scale > self.initial_loss_scale:
            raise ValueError(
                f"--min-scale {self.min_scale:g} (fp16.min_loss_scale) is above the loss scale of the first step, "
                f"--initial-loss-scale {self.initial_loss_scale:g} (2 ** fp16.initial_scale_power). Lower the one, or raise the "
                "other."
            )


@dataclass(eq=False, kw_only=True)
class LossScaler:
    """A loss scale, constant or dynamic (Micikevicius et al., arXiv:1710.03740, sec. 3.2).

    Dynamic: an overflow uses up one unit of `hysteresis`; once it is used up the scale halves, not below `min_scale`.
    `window` clean steps in a row double the scale and refill the hysteresis; `consecutive_hysteresis` refills it at each of them.
    At the minimum another overflow is an error, or with `raise_error_at_min_scale` false one more skipped step.
    """

    scale: float = field(default=1.0, kw_only=False)
    dynamic: bool = False
    window: float = 1000
    min_scale: float = 1.0
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        self.hysteresis_left = self.hysteresis
        self.clean_steps = self.overflows_in_a_row = 0
        self.cur_iter = 0  # steps, skipped ones included

    @classmethod
    def from_config(cls, config: PrecisionConfig, raise_error_at_min_scale: bool = True) -> LossScaler:
        """The scaler that `config` asks for: 1 for fp32 and bf16."""
        if not config.fp16:
            return cls(1.0)
        if config.loss_scale:
            return cls(config.loss_scale)
        return cls(
            config.initial_loss_scale,
            dynamic=True,
            window=config.loss_scale_window,
            min_scale=config.min_scale,
            hysteresis=config.hysteresis,
            consecutive_hysteresis=config.consecutive_hysteresis,
            raise_error_at_min_scale=raise_error_at_min_scale,
        )

    # DeepSpeed's names of the same things.
    cur_scale = property(lambda self: self.scale, doc="The current scale.")
    dynamic_loss_scale = property(lambda self: self.dynamic, doc="Whether the scale adapts.")
    scale_window = property(lambda self: self.window, doc="Clean steps after which the scale doubles.")
    min_loss_scale = property(lambda self: self.min_scale, doc="The scale never goes below this.")

    def update(self, overflow: bool, where: str = "an unknown place") -> None:
        """Adapts the scale to the outcome of one step.

        Args:
            where: which gradient is not finite, if one is, for messages.

        Raises:
            FloatingPointError: a smaller scale cannot help: the scale is at its minimum (see `raise_error_at_min_scale`), or is
                fixed and MAX_OVERFLOWS_IN_A_ROW steps in a row have overflowed.
        """
        self.cur_iter += 1
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if overflow else 0
        if not self.dynamic:
            self._check_static(where)
        elif overflow:
            self.clean_steps = 0
            self.hysteresis_left -= 1
            self._after_overflow(where)
        else:
            self.clean_steps += 1
            self._after_clean_step()

    def _after_clean_step(self) -> None:
        if self.clean_steps % self.window == 0:
            self.scale *= 2
        if self.consecutive_hysteresis or self.clean_steps % self.window == 0:
            self.hysteresis_left = self.hysteresis

    def _after_overflow(self, where: str) -> None:
        if self.hysteresis_left > 0:
            left = counted(self.hysteresis_left, "more overflow")
            logger.info(
                "gradient overflow in %s: step skipped; %s until the loss scale %.0f halves", where, left, self.scale
            )
            return
        if self.scale <= self.min_scale:
            if self.raise_error_at_min_scale:
                raise FloatingPointError(
                    "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. The fp16 gradients "
                    f"overflow even at the least scale, {self.min_scale} (first in {where}): they are inf "
                    "or NaN themselves. Lower the learning rate (--lr), lengthen its warm-up, or compute in bf16 (--bf16)."
                )
            logger.warning(
                "gradient overflow in %s at the least loss scale, %g: step skipped", where, self.scale, extra=ALIKE
            )
            return
        old, self.scale = self.scale, max(self.scale / 2, self.min_scale)
        logger.info("gradient overflow in %s: loss scale %.0f -> %.0f, step skipped", where, old, self.scale)

    def _check_static(self, where: str) -> None:
        if self.overflows_in_a_row:
            logger.warning(
                "the gradient norm is not finite (first in %s): step skipped (%d in a row)",
                where,
                self.overflows_in_a_row,
                extra=ALIKE,
            )
        if self.overflows_in_a_row >= MAX_OVERFLOWS_IN_A_ROW:
            advice = "Lower the learning rate (--lr), or lengthen its warm-up."
            if self.scale > 1:  # else there is none, or a smaller one would not help
                advice += (
                    f" The loss scale is fixed at {self.scale}; 0 (--loss-scale, fp16.loss_scale) makes it dynamic."
                )
            raise FloatingPointError(
                f"The gradients were inf or NaN in {self.overflows_in_a_row} steps in a row, the last time first in "
                f"{where}, and nothing was learned in them. {advice}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters."""
        kept = {name: getattr(self, name) for name in _CONTINUED}
        return {"dynamic": self.dynamic, "overflows_in_a_row": self.overflows_in_a_row, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state` if both scales are dynamic; else this one stays: the 1.0 of an fp32 run does not suit fp16.

        Overflows in a row are counted on in any case: a broken run that restarts by itself must end too.
        """
        self.overflows_in_a_row = state.get("overflows_in_a_row", 0)  # of older and imported checkpoints: unknown
        if self.dynamic and state.get("dynamic", True):
            for name in _CONTINUED:
                setattr(self, name, state[name])

"""What the engine is told about ZeRO: which model states are sharded, in which dtype gradients add up, how they travel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megazero.option import option

STAGES = (0, 1, 2, 3)
GRAD_DTYPES = ("fp32", "compute")
REDUCE_DTYPES = ("same", "fp32", "compute")


@dataclass(frozen=True)
class ZeroConfig:
    """Which model states are sharded over the data-parallel group (ZeRO, arXiv:1910.02054) and how gradients are reduced."""

    stage: int = option(
        0,
        "states sharded over data-parallel ranks: 0 none, 1 the optimizer's, 2 + gradients, 3 + parameters",
        choices=STAGES,
        flag="--zero-stage",
    )
    grad_dtype: str = option(
        "fp32", "dtype in which gradients accumulate; compute: that of the parameters", choices=GRAD_DTYPES
    )
    reduce_dtype: str = option(
        "same", "dtype of gradients on the wire; same: that of --grad-dtype", choices=REDUCE_DTYPES
    )
    gradient_predivide_factor: float = 1.0  # gradients are divided by it before they are summed, by the rest afterwards
    prescale_gradients: bool = False  # they are divided by the number of data-parallel ranks before they are summed
    overlap_comm: bool = True  # gradients travel while backward goes on
    param_home: str = "accelerator"  # where the shards of the parameters rest
    optimizer_home: str = "accelerator"  # where the fp32 master weights and the optimizer's moments rest

    def __post_init__(self) -> None:
        for name, flag, choices in (
            ("stage", "--zero-stage", STAGES),
            ("grad_dtype", "--grad-dtype", GRAD_DTYPES),
            ("reduce_dtype", "--reduce-dtype", REDUCE_DTYPES),
        ):
            value = getattr(self, name)
            if value not in choices or isinstance(value, bool):
                raise ValueError(f"{flag} (zero.{name}) must be one of {', '.join(map(str, choices))}, got {value!r}.")
        if not 0 < self.gradient_predivide_factor < math.inf:
            raise ValueError(
                f"gradient_predivide_factor must be a positive number, got {self.gradient_predivide_factor}."
            )
        for name in ("param_home", "optimizer_home"):
            home = getattr(self, name)
            if home in ("cpu", "nvme"):
                raise ValueError(
                    f"zero.{name}={home!r} is not there yet: shards can rest on the accelerator only. Drop the setting; a "
                    "higher --zero-stage or more ranks save memory on each of them."
                )
            if home != "accelerator":
                raise ValueError(f"zero.{name} must be 'accelerator' ('cpu' and 'nvme' are to come), got {home!r}.")

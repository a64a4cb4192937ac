"""How weights begin: normal, with residual projections scaled down by depth."""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from megazero.model.config import GPT2Config
from megazero.mpu.init import InitMethod


def normal_init(config: GPT2Config) -> InitMethod:
    """An initialiser that draws from N(0, std^2), with std = `init_method_std`."""
    return partial(nn.init.normal_, std=config.init_method_std)


def residual_init(config: GPT2Config) -> InitMethod:
    """An initialiser for the 2 x `num_layers` projections that add to the residual stream: N(0, std^2 / (2 num_layers)).

    Independent contributions add in variance, so the stream leaves the last block as wide as one unscaled contribution
    (GPT-2, sec. 2.3).
    """
    return partial(nn.init.normal_, std=config.init_method_std / math.sqrt(2.0 * config.num_layers))

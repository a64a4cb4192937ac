"""GPT-2 and its parts, on top of `megazero.mpu`."""

from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model

__all__ = ["GPT2Config", "GPT2Model"]

"""DeepSpeed's `ops`: optimizers under the names that scripts use."""

from megazero.ops import adam

__all__ = ["adam"]

"""Which bucket each parameter lies in: a table that keeps nothing alive."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from megazero.zero.bucket import Bucket

# The values are weak references, because a bucket refers to its parameters.
_bucket_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# The only attribute set on parameters, which are the user's objects. A bucket that no engine keeps must be freed together with
# its parameters, and a table that refers to the bucket would keep them alive.
_KEPT = "_bucket_without_engine"


def bucket_of(parameter: Tensor) -> Bucket | None:
    """The bucket that holds `parameter`; None if neither an engine nor `zero.Init` has put it into one."""
    reference = _bucket_of.get(parameter)
    return None if reference is None else reference()


def set_bucket(parameter: nn.Parameter, bucket: Bucket) -> None:
    """Records that `parameter` now lies in `bucket` and in no other one. The caller must keep the bucket alive."""
    _bucket_of[parameter] = ref(bucket)
    vars(parameter).pop(_KEPT, None)


def keep(parameter: nn.Parameter, bucket: Bucket) -> None:
    """Keeps `bucket` alive as long as `parameter`, which lies in it, or until another bucket holds the parameter.

    The two refer to each other, so a garbage collection frees both.
    """
    setattr(parameter, _KEPT, bucket)


def forget(parameter: nn.Parameter) -> None:
    """Records that `parameter` no longer lies in any bucket."""
    _bucket_of.pop(parameter, None)
    vars(parameter).pop(_KEPT, None)

"""In which bucket each parameter lies: a table that keeps nothing alive."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from megazero.zero.bucket import Bucket

# To a weak reference: a bucket refers to its parameters.
_bucket_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Nothing else is hung on parameters, which are the user's objects: a bucket that no engine keeps must go with its parameters, and
# a table to it would keep these.
_KEPT = "_bucket_without_engine"


def bucket_of(parameter: nn.Parameter) -> Bucket | None:
    """The bucket that holds `parameter`; None if no engine and no `zero.Init` has laid it into one."""
    reference = _bucket_of.get(parameter)
    return None if reference is None else reference()


def set_bucket(parameter: nn.Parameter, bucket: Bucket) -> None:
    """Records that `parameter` lies in `bucket`, and in no other any more. The caller keeps the bucket."""
    _bucket_of[parameter] = ref(bucket)
    vars(parameter).pop(_KEPT, None)


def keep(parameter: nn.Parameter, bucket: Bucket) -> None:
    """Lets `bucket`, in which `parameter` lies, live as long as that does, in whichever module; until another bucket holds it.

    They refer to each other, so that both go at a garbage collection.
    """
    setattr(parameter, _KEPT, bucket)


def forget(parameter: nn.Parameter) -> None:
    """Records that `parameter` lies in no bucket any more."""
    _bucket_of.pop(parameter, None)
    vars(parameter).pop(_KEPT, None)

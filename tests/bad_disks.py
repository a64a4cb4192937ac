"""Disks that are full or fail: what tests of their errors share."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Inside the block, this process can make no file larger: "File too large", at any byte, where a disk would be full."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def failing(number: int) -> Callable[..., NoReturn]:
    """A function to put in the place of a call: it fails with this number, and the error names no file."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


# In the place of a call on a disk that fails, and on a full one.
fails, full = failing(errno.EIO), failing(errno.ENOSPC)

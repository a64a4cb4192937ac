"""Disks that are full or fail: what tests of their errors share."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
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


def fails(*_: object, **__: object) -> NoReturn:
    """In the place of a system call: the disk fails, and the error names no file."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))

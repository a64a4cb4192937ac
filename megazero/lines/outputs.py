"""What is not to be overwritten, and what to say of a full disk."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megazero.files import is_there

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDiskError(OSError):
    """The disk is full; the message says what was written and what to do."""


@contextmanager
def full_disk_named(what: str, kept: str = "what is done is kept") -> Iterator[None]:
    """Turns the error of a full disk into a FullDiskError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, FullDiskError):
            raise
        message = f"{error.strerror} while writing {what}: make room and start again, {kept}"
        raise FullDiskError(error.errno, message) from error


def check_ours(outputs: Sequence[Path], flag: str, *vouchers: Path) -> None:
    """Raises a ValueError where an output exists that no run of these tools has made: it would be overwritten.

    One of other input or settings, or that is not whole, will be, and a line says so.

    Args:
        flag: that names the output, for the message.
        vouchers: records of finished runs, and journals of unfinished ones: where one of them is there, the outputs are ours.
    """
    found = [path for path in outputs if is_there(path)]
    if not found:
        return
    if not any(is_there(path) for path in vouchers):
        raise ValueError(
            f"{flag} {found[0]} exists and was not made by this tool. Move it away, or choose another name."
        )
    logger.info("%s is not whole, or of other input or settings: it stays until this run has replaced it", found[0])

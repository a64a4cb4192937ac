"""The system calls of a swap file: past the page cache where the file system lets us, through it where it does not."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from contextlib import suppress
from typing import BinaryIO

from megazero.nvme.pages import PAGE, aligned_empty

# What a file system answers to a request that it does not know.
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
# Of linux/fs.h, where it is generic (x86_64, aarch64); ioctl_iflags(2).
_GET_FLAGS, _SET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x40086602, 0x00800000


class FileTransport:
    """`os.preadv` and `os.pwritev` with O_DIRECT, or without where the file system refuses it at opening or at the first page.

    The page cache would copy every byte once more and take the memory that the state has left. Called by many threads at once.

    Attributes:
        why_buffered: why bytes go through the page cache; None where they do not.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Takes an open, empty file, tries one page, and leaves the file empty."""
        self.file = file
        _overwrite_in_place(file.fileno())
        self.why_buffered = self._try_direct()

    def read(self, view: memoryview, offset: int) -> int:
        """Fills the beginning of `view` from the file; the bytes read, which may be fewer than asked, and 0 at the file's end."""
        return os.preadv(self.file.fileno(), [view], offset)

    def write(self, view: memoryview, offset: int) -> int:
        """Writes the beginning of `view` to the file; the bytes written, which may be fewer than asked."""
        return os.pwritev(self.file.fileno(), [view], offset)

    def _try_direct(self) -> str | None:
        if not hasattr(os, "O_DIRECT"):
            return "this system has no O_DIRECT"
        flags = fcntl.fcntl(self.file, fcntl.F_GETFL)
        page = aligned_empty(PAGE).numpy().data
        try:
            fcntl.fcntl(self.file, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.write(page, 0)
            self.read(page, 0)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            fcntl.fcntl(self.file, fcntl.F_SETFL, flags)
            return f"the file system refuses O_DIRECT ({error.strerror})"
        finally:
            os.ftruncate(self.file.fileno(), 0)
        return None


def _overwrite_in_place(descriptor: int) -> None:
    """Has btrfs write an empty file where its space is reserved. It would do so once, and the next time ask for new space."""
    with suppress(OSError):  # others know no such flag
        (flags,) = struct.unpack("l", fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8)))
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("l", flags | _NO_COPY_ON_WRITE))


def reserve(descriptor: int, offset: int, size: int) -> bool:
    """Gives a file space on the disk, if the system and the file system can do so before it is written: whether they can.

    Not by os.posix_fallocate: for a file system that cannot (NFS before 4.2, much of FUSE), glibc writes a byte of every 4 KiB,
    each of which may be a round trip: an hour for 100 GB.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:  # macOS
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while fallocate(descriptor, 0, offset, size):
        error = ctypes.get_errno()
        if error in UNSUPPORTED:
            return False
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))
    return True

"""The swap file of one rank: places in it, and reading and writing them in the background.

The file has no name in its folder, from the start: the kernel gives its space back when the process and its forked children
(data workers) end, however they end. So a crashed run leaves nothing behind, and there is nothing of a living one that another
could take away. `df` counts it and `du` does not; `lsof +L1` shows it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from megazero.nvme.pages import PAGE, padded
from megazero.nvme.regions import Region, Regions
from megazero.nvme.transfer import AioConfig, Kind, Requests, Transfer
from megazero.nvme.transport import FileTransport, reserve

logger = logging.getLogger(__name__)

_ADVICE = (
    "Free space there, set nvme_path (--nvme-path) to a larger file system, use more data-parallel ranks, or leave a state in "
    "host memory (offload_optimizer.device or offload_param.device: cpu)"
)


def check_folder(folder: str | Path) -> None:
    """Returns if a file can be made in `folder`.

    Raises:
        OSError: it is absent, not a directory, or not writable; of the subclass and errno of the reason.
    """
    _open_unnamed(Path(folder), "").close()


class SwapFile:
    """Regions of bytes in one file per rank, in a folder that should lie on an NVMe drive.

    Methods may be called from any thread. Buffers are contiguous CPU tensors of any dtype, of whole pages, starting at one:
    `aligned_empty(padded(nbytes))` and its slices at pages. What a region holds before the first write is zero or old bytes.
    After a write that failed the file is lost: every later `read` and `write` raises that error again.

    Attributes:
        path: what messages call the file.
        why_buffered: why bytes go through the page cache; None where they bypass it.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        aio: AioConfig | None = None,
        *,
        transport: Callable[[BinaryIO], FileTransport] = FileTransport,
    ) -> None:
        """Makes the file.

        Args:
            folder: an existing directory; several ranks and jobs may share it.
            rank: named in messages.
            transport: makes the system calls; the tests' way to slow, break and count them.

        Raises:
            OSError: as `check_folder`; EAGAIN where its threads cannot be started.
        """
        aio = aio or AioConfig()
        self.rank = rank
        self.path = Path(folder) / f"swap file of rank {rank}"
        self._file = _open_unnamed(Path(folder), f"rank {rank}: ")
        try:
            opened = transport(self._file)
        except OSError as error:
            self._file.close()
            text = f"rank {rank}: the first page could not be written: {error.strerror}"
            raise OSError(error.errno, text, str(self.path)) from error
        self.why_buffered = opened.why_buffered
        if self.why_buffered:
            logger.warning(
                "%s goes through the page cache, which is slower and takes memory: %s", self.path, self.why_buffered
            )
        if aio.threads < aio.queue_depth * aio.thread_count:
            logger.info("aio.queue_depth x aio.thread_count: %s requests in flight are enough", aio.threads)
        try:
            self._requests = Requests(opened, aio, self.path, rank)
        except OSError:
            self._file.close()
            raise
        self._lock = threading.Lock()
        self._regions = Regions()
        self._size = 0  # of the file
        self._reserves = True

    def __enter__(self) -> SwapFile:
        """Itself; closed at the end of the block."""
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._file.closed

    @property
    def nbytes(self) -> int:
        """The part of the file that has been in use: regions in use and those freed."""
        return self._regions.end

    def reserve(self, nbytes: int) -> None:
        """Reserves space on the disk for regions of `nbytes` in all, which no other file can take any more.

        Raises:
            OSError: the disk has less, or the file would be too large for a limit of the system.
        """
        with self._lock:
            self._extend(padded(nbytes))

    def allocate(self, nbytes: int) -> Region:
        """A region of `nbytes`, rounded up to whole pages; its space on the disk is reserved, unless `reserve` has done so.

        Raises:
            OSError: the disk is full, or the file too large for a limit of the system.
        """
        if nbytes < 0:
            raise ValueError(f"a region needs 0 bytes or more, got {nbytes}.")
        size = padded(nbytes)
        if size == 0:
            return Region(0, 0)
        with self._lock:
            region = self._regions.reuse(size)
            if region is None:
                self._extend(self._regions.end + size)
                region = self._regions.append(size)
            return region

    def free(self, region: Region) -> None:
        """Lets others have the space, once what is under way there has ended; waits for nothing, so finalizers may call it.

        Raises:
            RuntimeError: the region is not in use.
        """
        if region.nbytes:
            self._check_in_use(region)
            self._regions.free(region)

    def read(self, region: Region, buffer: Tensor, offset: int = 0, *, after: Transfer | None = None) -> Transfer:
        """Starts to fill `buffer` with the bytes of `region` from its byte `offset` on.

        Args:
            offset: whole pages.
            after: starts when this one has ended, and fails with it.

        Raises:
            ValueError: `buffer` or `offset` is not in whole pages, or reaches beyond the region.
            RuntimeError: the region was freed, or the file closed.
            OSError: an earlier write has failed.
        """
        return self._start("read", region, buffer, offset, after)

    def write(
        self,
        region: Region,
        buffer: Tensor,
        offset: int = 0,
        *,
        after: Transfer | None = None,
        filled: Callable[[], None] | None = None,
    ) -> Transfer:
        """Starts to write `buffer` into `region` from its byte `offset` on; arguments and errors as in `read`.

        Args:
            filled: returns when the buffer has its bytes, where a device still sends them; called by the threads that write.
        """
        return self._start("write", region, buffer, offset, after, filled)

    def raise_failure(self) -> None:
        """Returns where every write that has ended has ended well.

        Raises:
            OSError: one has not: file, offset, errno and rank of the first, at every call.
        """
        self._requests.raise_failure()

    def close(self) -> None:
        """Waits for what is under way and gives the space back. Closing twice is harmless."""
        self._requests.close()
        self._file.close()

    def _start(
        self,
        kind: Kind,
        region: Region,
        buffer: Tensor,
        offset: int,
        after: Transfer | None,
        filled: Callable[[], None] | None = None,
    ) -> Transfer:
        if self.is_closed:
            raise RuntimeError(f"{kind} of {self.path}, which is closed.")
        if region.nbytes:
            self._check_in_use(region)
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(
                f"{kind} of {self.path} needs a contiguous CPU tensor, got {tuple(buffer.shape)} on {buffer.device}."
            )
        if buffer.data_ptr() % PAGE or buffer.nbytes % PAGE or offset % PAGE:
            raise ValueError(
                f"{kind} of {self.path} needs whole pages ({PAGE} bytes): a buffer of {buffer.nbytes} bytes starts "
                f"{buffer.data_ptr() % PAGE} bytes behind a page, offset is {offset}. Use aligned_empty(padded(nbytes))."
            )
        if offset < 0 or offset + buffer.nbytes > region.nbytes:
            raise ValueError(
                f"{kind} of {self.path}: {buffer.nbytes} bytes from {offset} on, the region has {region.nbytes}."
            )
        view = buffer.detach().view(-1).view(torch.uint8).numpy().data
        transfer = self._requests.start(kind, view, region.offset + offset, after, filled)
        self._regions.hold(region, transfer)
        return transfer

    def _check_in_use(self, region: Region) -> None:
        if region not in self._regions:
            raise RuntimeError(f"{region} of {self.path} is not in use: it was freed, or belongs to another file.")

    def _extend(self, to: int) -> None:
        """Makes the file at least `to` bytes long."""
        descriptor, size, more = self._file.fileno(), self._size, to - self._size
        if more <= 0:
            return
        try:
            if more > shutil.disk_usage(descriptor).free:  # asked first: trying would fill the disk for all
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._reserves and not reserve(descriptor, size, more):
                self._reserves = False
                logger.warning("%s: space cannot be reserved there; a full disk shows at a write only", self.path)
            if not self._reserves:
                os.ftruncate(descriptor, to)
        except OSError as error:
            os.ftruncate(descriptor, size)  # what was reserved of it
            free = shutil.disk_usage(descriptor).free
            text = f"rank {self.rank}: {more} bytes more than the {size} it has: {error.strerror}; {free} are free"
            advice = "Raise the limit of a file's size (ulimit -f)" if error.errno == errno.EFBIG else _ADVICE
            raise OSError(error.errno, f"{text}. {advice}", str(self.path)) from error
        self._size = to


def _open_unnamed(folder: Path, who: str) -> BinaryIO:
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a directory")
        return cast(BinaryIO, tempfile.TemporaryFile(buffering=0, prefix="megazero-", dir=folder))
    except OSError as error:
        text = "nvme_path must be an existing directory that this job may write to, on the drive to swap to"
        raise OSError(error.errno, f"{who}--nvme-path or {text}: {error.strerror}", str(folder)) from error

"""Bytes on an NVMe drive (ZeRO-Infinity, arXiv:2104.07857, section 6.3): one swap file per rank, read and written in the
background from page-aligned buffers. `megazero.zero.nvme_home` keeps model states in it.

    swap = SwapFile(folder, rank)
    region, buffer = swap.allocate(nbytes), aligned_empty(padded(nbytes), pin=True)
    written = swap.write(region, buffer)            # goes on while the caller computes
    read = swap.read(region, buffer, after=written)
    read.wait()
"""

from megazero.nvme.pages import PAGE, PagePool, aligned_empty, padded
from megazero.nvme.regions import Region
from megazero.nvme.swap_file import SwapFile, check_folder
from megazero.nvme.transfer import AioConfig, SwapFileError, Transfer
from megazero.nvme.transport import FileTransport

__all__ = [
    "PAGE",
    "AioConfig",
    "FileTransport",
    "PagePool",
    "Region",
    "SwapFile",
    "SwapFileError",
    "Transfer",
    "aligned_empty",
    "check_folder",
    "padded",
]

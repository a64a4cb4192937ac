"""Links between the ranks of one host: memory that all of them map, and sockets on which they wait for each other.

The memory is anonymous (memfd) and travels over Unix sockets of the abstract namespace, as do the waits: nothing has a path, so
nothing stays behind when a process dies, containers' small /dev/shm does not matter, and a dead rank is seen at once, because
the kernel closes its sockets. A wait costs 15 us (2 ranks) where gloo's barrier costs 200 us, and leaves the core to others.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.transport import MESSAGE_BYTES, check, message
from megazero.comm.world import ProcessGroup, all_gathered_objects

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 30.0  # for a rank to take up its links: all of them are about to


class Links:
    """A connected socket to every other rank of a group, and the memory area of each rank."""

    def __init__(
        self, sockets: dict[int, socket.socket], areas: list[Tensor], ranks: list[int], timeout_s: float
    ) -> None:
        self.areas = areas  # uint8, by rank in the group: this rank writes its own and reads the others
        self.timeout_s = timeout_s
        self._sockets = sockets  # by rank in the group, without this one
        self._ranks = ranks  # of the world, for messages
        for peer in sockets.values():
            peer.settimeout(timeout_s)
        _open_links.add(self)

    def sync(self, what: str) -> None:
        """Returns when every rank has come here with the same `what`; all then see what any of them wrote into its area before.

        (Sending and receiving take the same lock in the kernel, which orders memory on every architecture.)

        Raises:
            RuntimeError: a rank has ended, did not come within the timeout, or came with another `what`.
        """
        mine = message(what)
        peer = -1
        try:
            for peer in self._sockets:
                with suppress(ConnectionError):  # it has closed; what it said last, which is read below, may tell why
                    self._sockets[peer].send(mine)
            for peer in self._sockets:
                theirs = self._receive(peer)
                if not theirs:
                    raise ConnectionResetError
                check(theirs, what, self._ranks[peer])
        except TimeoutError:
            raise RuntimeError(f"rank {self._ranks[peer]} did not come within {self.timeout_s:g} s") from None
        except OSError as error:
            raise RuntimeError(
                f"rank {self._ranks[peer]} has ended, or closed its channel ({str(error) or 'end of stream'})"
            ) from None

    def close(self) -> None:
        """Ends the links, which the other ranks see, and drops the areas: memory goes when no rank maps it any more."""
        for peer in self._sockets.values():
            with suppress(OSError):  # closed already, here or there
                peer.shutdown(socket.SHUT_RDWR)  # ends the connection even if some process has a copy of the socket
        self.abandon()

    def abandon(self) -> None:
        """Gives up this process's copies of sockets and areas, and leaves the links as they are for whoever has others."""
        for peer in self._sockets.values():
            peer.close()
        self.areas = []

    def _receive(self, peer: int) -> bytes:
        """The next message of `peer`, empty if it has closed and said no more."""
        try:
            return self._sockets[peer].recv(MESSAGE_BYTES)
        except ConnectionResetError:  # it closed with messages unread: the kernel tells this once, before what it said
            return self._sockets[peer].recv(MESSAGE_BYTES)


_open_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _abandon_all() -> None:
    """Drops what a forked child (a worker of a DataLoader) inherits: its copies would hide the death of this rank from others."""
    for links in list(_open_links):
        links.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def link(group: ProcessGroup, area_bytes: int, timeout_s: float, count: int = 1) -> list[Links]:
    """`count` independent links of this rank to the others of `group`; none on every rank if not all can be linked. Collective.

    Args:
        group: two ranks or more.
        area_bytes: size of each rank's area.
        timeout_s: seconds that `Links.sync` waits for a rank.
    """
    ends: list[_End] = []
    opened: list[Links] = []
    problem = None
    try:
        for _ in range(count):
            ends.append(_End(area_bytes))
    except (OSError, AttributeError) as error:  # AttributeError: a system without memfd
        problem = f"{type(error).__name__}: {error}"
    addresses = all_gathered_objects(problem or [end.address for end in ends], group)
    problems = [address if isinstance(address, str) else None for address in addresses]
    if not any(problems) and len({first.host for first, *_ in addresses}) == 1:
        for end, of_ranks in zip(ends, zip(*addresses, strict=True), strict=True):
            try:
                opened.append(_join(end, of_ranks, group, timeout_s))
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if any(problems := all_gathered_objects(problem, group)):
                break
    for end in ends:
        end.close()
    if any(problems):
        for links in opened:
            links.close()
        opened = []
    failed = {rank: text for rank, text in zip(dist.get_process_group_ranks(group), problems, strict=True) if text}
    if failed and group.rank() == 0:
        rank, text = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        logger.warning("no shared memory between the ranks of this host: rank %d%s failed with %s", rank, more, text)
    return opened


class _Address(NamedTuple):
    """Where and how to dial a rank."""

    host: str  # of `host_identity`
    name: bytes
    secret: bytes  # any local user could dial


class _End:
    """What one rank brings to its links: a socket that others can dial before it accepts, and its memory."""

    def __init__(self, area_bytes: int) -> None:
        with ExitStack() as undo:
            self.memory = os.memfd_create("megazero")
            undo.callback(os.close, self.memory)  # mappings outlive the descriptor
            os.posix_fallocate(self.memory, 0, area_bytes)  # now: a page that is missing later would be a SIGBUS
            self.area = _map(self.memory)
            self.listener = undo.enter_context(_seqpacket())
            self.listener.bind(b"\0megazero-" + secrets.token_hex(12).encode())
            self.listener.listen(4096)
            self.address = _Address(host_identity(), self.listener.getsockname(), secrets.token_bytes(16))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Closes the descriptors, which nobody needs once the ranks are linked."""
        self._undo.close()


def _join(end: _End, addresses: Sequence[_Address], group: ProcessGroup, timeout_s: float) -> Links:
    """Dials the lower ranks and takes the calls of the higher ones; then each sends every other its memory."""
    rank, size = group.rank(), group.size()
    sockets: dict[int, socket.socket] = {}
    areas = {rank: end.area}
    try:
        for peer in range(rank):
            sockets[peer] = _seqpacket()
            sockets[peer].connect(addresses[peer].name)
            sockets[peer].send(addresses[peer].secret + rank.to_bytes(4, "little"))
        while len(sockets) < size - 1:
            caller = end.listener.accept()[0]
            caller.settimeout(_JOIN_TIMEOUT_S)
            hello = caller.recv(MESSAGE_BYTES)
            if hello[:-4] == end.address.secret:
                sockets[int.from_bytes(hello[-4:], "little")] = caller
            else:
                caller.close()
        for peer in sockets:
            socket.send_fds(sockets[peer], [b"memory"], [end.memory])
        for peer in sockets:
            _, (memory,), _, _ = socket.recv_fds(sockets[peer], MESSAGE_BYTES, 1)
            try:
                areas[peer] = _map(memory)
            finally:
                os.close(memory)
    except BaseException:
        for peer in sockets:
            sockets[peer].close()
        raise
    return Links(sockets, [areas[peer] for peer in range(size)], dist.get_process_group_ranks(group), timeout_s)


def _map(memory: int) -> Tensor:
    """The memory behind a descriptor, uint8 [bytes]; unmapped with the last tensor that views it."""
    return torch.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=torch.uint8)


def host_identity() -> str:
    """The running kernel and network namespace: equal on ranks that abstract sockets, and loopback addresses, connect."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _seqpacket() -> socket.socket:
    """A Unix socket that keeps messages apart."""
    created = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    created.settimeout(_JOIN_TIMEOUT_S)
    return created

"""Whether the hosts of a job can reach each other over gloo: asked before the first of its groups, which would wait in vain."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from megazero.comm.links import host_identity
from megazero.comm.meeting import Meeting

CONNECT_S = 30.0  # ranks that have just met connect within milliseconds; a firewall that drops packets answers nothing


def refuse_unreachable(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Returns if ranks are on one host, or if gloo connects the ranks at which one host ends and the next begins. Collective.

    gloo itself would wait five times its timeout on the hosts that nobody can connect to. Each rank asks the store a few
    questions, and makes two connections at most, however many ranks there are.

    Args:
        store: one that nobody has asked before.

    Raises:
        ValueError: on every rank. Some host's gloo would listen on a loopback address, or on an interface that is not there; or
            cannot be reached at its address, or at the ports that the kernel gives it.
    """
    here = host_identity() if sys.platform == "linux" else socket.gethostname()
    store.set(f"host/{rank}", here)
    if store.compare_set("host", "", here).decode() != here:
        store.set("has several", "hosts")
    if reason := _why_unreachable():
        store.compare_set("unreachable", "", f"on the host of rank {rank}, {reason}")
    meeting = Meeting(dist.PrefixStore("meeting/", store), list(range(world_size)), rank, timeout_s)
    meeting.hold("init_distributed")
    if not store.check(["has several"]):
        return
    _refuse(store, "unreachable")
    connected = []  # as long as others connect
    for turn in range(2):  # ranks 0 and 1, 2 and 3, ...; then 1 and 2, 3 and 4, ...
        first = rank - (rank + turn) % 2
        other = 2 * first + 1 - rank
        if 0 <= first < world_size - 1 and store.get(f"host/{other}").decode() != here:
            try:
                connected.append(_connected(store, first, rank, timeout_s))
            except RuntimeError as error:
                if rank > first:  # it connects to the other one, and knows why it cannot
                    reason = str(error).partition("\n")[0].rpartition("] ")[2].rstrip(".")
                    told = f"the host of rank {rank}, {socket.gethostname()}, cannot connect to that of rank {first} ({reason}). "
                    told += "A port is closed there, or its address is not one for others"
                    store.compare_set(f"unreachable/{turn}", "", told)
        meeting.hold(f"gloo's first connections, {turn}")
        _refuse(store, f"unreachable/{turn}")


def _refuse(store: dist.Store, key: str) -> None:
    """Raises if a rank has said at `key` which host cannot be reached; all ranks have met since, and read the same."""
    if store.check([key]):
        raise ValueError(
            f"the hosts of this job cannot reach each other over gloo: {store.get(key).decode()}. Name the interface "
            "between the hosts, as each host calls it, in the environment of its ranks: NCCL_SOCKET_IFNAME=NAME, or "
            "GLOO_SOCKET_IFNAME=NAME for gloo alone; or correct /etc/hosts there, or open all ports between the hosts."
        )


def _connected(store: dist.Store, first: int, rank: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """A group of `rank` and the other one of the ranks `first` and `first` + 1, over gloo.

    Raises:
        RuntimeError: the other one does not come within `timeout_s` seconds, or gloo cannot connect them within `CONNECT_S`.
    """
    pair, own = dist.PrefixStore(f"pair/{first}/", store), rank - first
    pair.set(f"ready/{own}", "")
    pair.wait([f"ready/{1 - own}"], timedelta(seconds=timeout_s))
    # For a connection gloo waits five times what it is given, and for the other one's address in the store only once.
    return dist.ProcessGroupGloo(pair, own, 2, timedelta(seconds=min(CONNECT_S, timeout_s) / 5))


def _why_unreachable() -> str | None:
    """What keeps gloo from listening where other hosts reach this one; None if nothing does.

    gloo takes the interfaces that the user has named, which hosts may call differently. Without any, it takes the first address
    of the host's own name that is one of this host, and 127.0.0.1 if there is none.
    """
    here = [interface for _, interface in socket.if_nameindex()]
    others = ", ".join(interface for interface in here if interface != "lo")
    interfaces = f"; its interfaces are {others}" if others else ""
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        # "eth0:1" is a second address of eth0.
        absent = [interface for interface in named.split(",") if interface and interface.partition(":")[0] not in here]
        return f"GLOO_SOCKET_IFNAME={named} names {absent[0]!r}, which is not there{interfaces}" if absent else None
    name, known = socket.gethostname(), []
    with suppress(OSError):
        known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in known:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            found = str(address[0])
            return f"its name {name} is {found}{interfaces}" if ip_address(found).is_loopback else None
    return f"no address of it is known under its name {name}{interfaces}"

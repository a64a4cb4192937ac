"""Whether the hosts of a job can reach each other over gloo: asked before the first of its groups, which would wait in vain."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from ipaddress import ip_address

import torch.distributed as dist

from megazero.comm.links import host_identity
from megazero.comm.meeting import Meeting


def refuse_unreachable(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Returns if ranks are on one host, or if gloo listens on every host where others may reach it. Collective over the world.

    Each rank asks the store a few questions, however many ranks there are.

    Args:
        store: one that nobody has asked before.

    Raises:
        ValueError: on every rank. Some host's gloo would listen on a loopback address, or on an interface that is not there.
    """
    here = host_identity() if sys.platform == "linux" else socket.gethostname()
    if store.compare_set("host", "", here).decode() != here:
        store.set("has several", "hosts")
    if reason := _why_unreachable():
        store.compare_set("unreachable", "", f"on the host of rank {rank}, {reason}")
    Meeting(dist.PrefixStore("meeting/", store), list(range(world_size)), rank, timeout_s).hold("init_distributed")
    if store.check(["has several"]) and store.check(["unreachable"]):
        raise ValueError(
            f"the hosts of this job cannot reach each other over gloo: {store.get('unreachable').decode()}. Name the interface "
            "between the hosts, as each host calls it, in the environment of its ranks: NCCL_SOCKET_IFNAME=NAME, or "
            "GLOO_SOCKET_IFNAME=NAME for gloo alone; or correct /etc/hosts there."
        )


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

"""Hosts that cannot reach each other over gloo are told so before they wait for each other."""

import os
import socket
import time
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megazero import comm
from megazero.comm import reach
from tests.ranks import free_port, run_ranks


def play_host(host, addresses):
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.pop("NCCL_SOCKET_IFNAME", None)
    reach.host_identity = lambda: host
    socket.gethostname = lambda: f"node-{host}"
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (x, 0)) for x in addresses]
    socket.getaddrinfo = Mock(side_effect=None if known else socket.gaierror, return_value=known)
    socket.if_nameindex = lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")]


def close_ports(closed):
    """Makes gloo fail to connect to the host of the rank `closed`; returns the pairs of ranks that it was asked to connect."""
    real, asked = reach._connected, []

    def connected(store, first, rank, timeout_s):
        asked.append(first)
        if first == closed:
            raise RuntimeError(
                f"Gloo connectFullMesh failed with [/gloo/pair.cc:152] {'none' if rank == first else REFUSED}\nmore"
            )
        return real(store, first, rank, timeout_s)

    reach._connected = connected
    return asked


def join_case(hosts, port, again, ranks_per_host, named, closed=None):
    """What joining the world by the environment, as torchrun describes it, raises on this rank; None if nothing.

    `named`: the interfaces that the user has named on each rank, if any. `closed`: a rank whose host has its ports closed.
    """
    rank = dist.get_rank()
    asked = close_ports(closed)
    dist.barrier()  # a rank that ends the first world early breaks it for one that is still joining
    dist.destroy_process_group()
    play_host(*hosts[rank])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(ranks_per_host))
    if named:
        os.environ["GLOO_SOCKET_IFNAME"] = named[rank]
    try:
        comm.init_distributed("gloo")
    except ValueError as error:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        where = {"init_method": f"file://{again}", "rank": rank, "world_size": len(hosts)}
        comm.init_distributed("gloo", **where)  # for the harness
        return str(error), asked
    return None, asked


# Addresses of a host by its own name. 203.0.113.9 is one of no host here, as behind a NAT.
LOOPBACK, ELSEWHERE, UNKNOWN = ["127.0.1.1"], ["203.0.113.9", "127.0.0.2"], []
REFUSED = "timed out connecting: SO_ERROR: Connection refused, remote=[10.9.0.10]:25501$1"


@pytest.mark.parametrize(
    ("addresses", "named", "said"),
    [
        (LOOPBACK, (), "its name node-b is 127.0.1.1"),
        (ELSEWHERE, (), "its name node-b is 127.0.0.2"),
        (UNKNOWN, (), "no address of it is known under its name node-b"),
        (LOOPBACK, ("lo", "lo,eth9"), "GLOO_SOCKET_IFNAME=lo,eth9 names 'eth9', which is not there"),
    ],
)
def test_every_rank_is_told_which_host_the_others_cannot_reach(tmp_path, addresses, named, said):
    hosts = (("a", ["0.0.0.0"]), ("b", addresses))  # every host has the address 0.0.0.0, and it is no loopback address
    told = run_ranks(2, join_case, hosts, free_port(), f"{tmp_path}/again", 1, named)
    assert told[0] == told[1]
    assert f"over gloo: on the host of rank 1, {said}; its interfaces are eth0, ib0." in told[0][0]


@pytest.mark.parametrize(
    ("of", "closed", "pairs"), [("abbc", 2, [[0], [0], [2], [2]]), ("aabb", 1, [[], [1], [1], []])]
)
def test_every_rank_is_told_which_host_has_closed_its_ports(tmp_path, of, closed, pairs):
    hosts = tuple((host, LOOPBACK) for host in of)
    told = run_ranks(4, join_case, hosts, free_port(), f"{tmp_path}/again", 2, ("lo",) * 4, closed)
    other = f"rank {closed + 1}, node-{of[closed + 1]}"
    said = (
        f"over gloo: the host of {other}, cannot connect to that of rank {closed} ({REFUSED}). A port is closed there"
    )
    assert all(said in message for message, _ in told), told
    assert [asked for _, asked in told] == pairs, "only ranks of neighboring hosts connect"


def late_case(port):
    """One of two hosts comes to their connection late by more than gloo waits for an address."""
    rank, real_get, reach.CONNECT_S = dist.get_rank(), dist.PrefixStore.get, 5.0

    def get(store, key):
        time.sleep(2 if rank == 0 and key.startswith("host/") else 0)
        return real_get(store, key)

    dist.PrefixStore.get = get
    return join_case((("a", LOOPBACK), ("b", LOOPBACK)), port, "", 1, ("lo",) * 2)[0]


def test_a_host_may_come_late_to_its_connection():
    assert run_ranks(2, late_case, free_port()) == [None, None]


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "named"),
    [
        ((("a", LOOPBACK), ("a", LOOPBACK)), 1, ()),  # two torchruns on one host, to try things
        ((("a", LOOPBACK), ("b", LOOPBACK)), 1, ("lo", "lo,")),  # the user has named an interface
        (tuple((host, LOOPBACK) for host in "abcd"), 1, ("lo",) * 4),  # two of them connect to two others each
        ((("a", LOOPBACK), ("b", LOOPBACK)), 2, ()),  # torchrun says that all ranks are on one node
    ],
)
def test_hosts_that_reach_each_other_join(tmp_path, hosts, ranks_per_host, named):
    told = run_ranks(len(hosts), join_case, hosts, free_port(), "", ranks_per_host, named)
    assert all(message is None for message, _ in told)

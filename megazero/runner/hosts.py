"""Which machines a job runs on, and which of their accelerator slots: hostfile, --include and --exclude, Slurm."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from megazero.logging import some

Nodes = dict[str, list[int]]  # host -> its slots, in the order of the ranks


def parse_hostfile(text: str) -> dict[str, int]:
    """Host -> number of slots, in the file's order. A line is `host slots=N`; blank lines and `#` comments are skipped.

    Raises:
        ValueError: a line has another form, a host is named twice, or there is no host.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = re.fullmatch(r"(\w[\w.-]*)\s+slots=([1-9]\d*)", content)
        if match is None:
            raise ValueError(
                f"hostfile line {number}: {line!r} is not of the form `host slots=N` with N of 1 or more, and a host of "
                "letters, digits, `.`, `-` and `_`. A user, a port or an IPv6 address for ssh belongs in ~/.ssh/config, under a "
                "name for the host."
            )
        host, slots = match[1], int(match[2])
        if host in hosts:
            raise ValueError(f"hostfile line {number}: {line!r} names the host {host} a second time.")
        hosts[host] = slots
    if not hosts:
        raise ValueError("the hostfile names no host: write one line `host slots=N` for each machine.")
    return hosts


def select(
    hosts: Mapping[str, int], include: str = "", exclude: str = "", num_nodes: int = -1, num_gpus: int = -1
) -> Nodes:
    """The slots to use on each host, in the order of `hosts`.

    Args:
        hosts: all available hosts, with their numbers of slots.
        include: use only these, `host` or `host:0,2`, several joined by `@`.
        exclude: use all but these, in the same form.
        num_nodes: use only the first so many hosts; -1: all of them.
        num_gpus: use only the first so many slots of each host; -1: all of them.

    Raises:
        ValueError: options exclude each other, the syntax is wrong, hosts or slots do not exist, or nothing is left.
    """
    if include and exclude:
        raise ValueError(
            "--include and --exclude cannot be given together: one names what to use, the other what not to."
        )
    for name, value in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if value != -1 and (include or exclude):
            raise ValueError(f"{name} cannot be given with --include or --exclude, which say already what is used.")
        if value != -1 and value < 1:
            raise ValueError(f"{name}={value}: use 1 or more, or -1 for all.")
    if include:
        named = _parse_filter(include, hosts, "--include")
        return {host: named[host] for host in hosts if host in named}
    dropped = _parse_filter(exclude, hosts, "--exclude") if exclude else {}
    nodes = {host: [s for s in range(count) if s not in dropped.get(host, [])] for host, count in hosts.items()}
    nodes = {host: slots for host, slots in nodes.items() if slots}
    if not nodes:
        raise ValueError(f"--exclude {exclude!r} leaves nothing of {_listed(hosts)}.")
    return _first(nodes, num_nodes, num_gpus)


def _first(nodes: Nodes, num_nodes: int, num_gpus: int) -> Nodes:
    if num_nodes > len(nodes):
        raise ValueError(f"--num_nodes {num_nodes}: only {_listed({h: len(s) for h, s in nodes.items()})} known.")
    if num_nodes != -1:
        nodes = dict(list(nodes.items())[:num_nodes])
    if num_gpus == -1:
        return nodes
    for host, slots in nodes.items():
        if num_gpus > len(slots):
            raise ValueError(f"--num_gpus {num_gpus}: {host} has only {len(slots)}.")
    return {host: slots[:num_gpus] for host, slots in nodes.items()}


def _parse_filter(text: str, hosts: Mapping[str, int], option: str) -> Nodes:
    """Host -> sorted slots, from `host:0,2@host2`; a host without slots means all of its slots."""
    found: dict[str, set[int]] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"\s*([^\s:,@]+)(?::(\d+(?:,\d+)*))?\s*", part)
        if match is None:
            raise ValueError(f"{option} {text!r}: {part!r} is not of the form `host` or `host:0,2`; join several by @.")
        host = match[1]
        if host not in hosts:
            raise ValueError(f"{option} {text!r}: there is no host {host!r} among {_listed(hosts)}.")
        slots = {int(slot) for slot in match[2].split(",")} if match[2] else set(range(hosts[host]))
        if max(slots) >= hosts[host]:
            raise ValueError(
                f"{option} {text!r}: {host} has the slots 0 to {hosts[host] - 1}, and no slot {max(slots)}."
            )
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def _listed(hosts: Mapping[str, int]) -> str:
    return some([f"{host} (slots={count})" for host, count in hosts.items()], 8)


def is_this_machine(host: str) -> bool:
    """Whether `host` names this machine, that is, whether one of its addresses can be bound here."""
    try:
        found = {(family, address[0]) for family, _, _, _, address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # the latter of a part of more than 63 characters
        return False  # ssh may know the name from its own configuration
    for family, address in found:
        # The name may have an IPv6 address in /etc/hosts where the kernel has no IPv6, and so no such sockets.
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def slurm_gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs per node by Slurm's variables, 0 if they do not say; salloc sets at most the second one.

    Their forms are `8`, `a100:8` and `a100:4,v100:2`.
    """
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        counts = re.findall(r"(?:^|[,:])(\d+)(?=,|$)", environment.get(name, ""))
        if total := sum(map(int, counts)):
            return total
    return 0


def slurm_hosts(nodelist: str) -> list[str]:
    """The host names in a Slurm node list, from `scontrol show hostnames`.

    Raises:
        ValueError: scontrol is missing, or it fails.
    """
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise ValueError(
            f"`{' '.join(command)}` failed: {str(reason).strip()}. --launcher slurm works inside an allocation."
        ) from None

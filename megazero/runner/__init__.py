"""The command `megazero [options] script.py [the script's arguments]`: DeepSpeed's launcher command line, translated to torchrun.

`main` is the command. The translation is done by pure functions: hosts.py selects hosts and their slots, commands.py makes the
commands that run on them, and environment.py their variables. This package imports torch only to count GPUs, so that errors come
at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megazero.children import keep_exit_statuses
from megazero.files import write_whole
from megazero.logging import counted, some
from megazero.runner import environment
from megazero.runner.arguments import HOSTFILE, parse
from megazero.runner.commands import (
    Program,
    agent_command,
    c10d,
    node_command,
    remote_command,
    srun_command,
    static,
    torchrun_command,
)
from megazero.runner.hosts import Nodes, is_this_machine, parse_hostfile, select, slurm_gpus, slurm_hosts
from megazero.runner.processes import Node, run_nodes

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29500
CPU_RANKS = 2  # on a machine without a GPU, unless --num_gpus (NPROC for scripts/) sets it


def main(argv: Sequence[str] | None = None) -> int:
    """The job's exit status: 0, that of the rank that failed first (128 + N for signal N), or 2 after a wrong command line."""
    keep_exit_statuses()
    try:
        options, program = parse(sys.argv[1:] if argv is None else argv)
        logging.basicConfig(format="megazero: %(message)s", level=options.log_level.upper())
        with _pid_file() if options.save_pid else nullcontext():
            return _launch(options, program)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _launch(options: argparse.Namespace, program: Program) -> int:
    if _under_slurm(options):
        return _run_slurm(options, program)
    hosts, has_gpus = _hosts(options)
    nodes = select(hosts, options.include, options.exclude, options.num_nodes, options.num_gpus)
    if options.no_ssh:
        return _run_one_of_many(options, program, nodes, has_gpus)
    here = set() if options.force_multi else {host for host in nodes if is_this_machine(host)}
    if len(nodes) == 1 and here:
        return _run_here(options, program, nodes, has_gpus)
    if options.launcher in ("torchrun", "local"):
        raise ValueError(f"--launcher {options.launcher} is for this machine alone, not for {', '.join(nodes)}.")
    return _run_many(options, program, nodes, here, has_gpus)


def _hosts(options: argparse.Namespace) -> tuple[dict[str, int], bool]:
    """All hosts with their slots, and whether slots stand for GPUs."""
    if options.hostfile is not None or os.path.isfile(HOSTFILE):
        path = options.hostfile or HOSTFILE
        try:
            return parse_hostfile(Path(path).read_text()), True
        except OSError as error:
            raise ValueError(f"--hostfile {path} cannot be read ({error.strerror}).") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if options.num_nodes < 1:
        of_pods = "--no_ssh --num_nodes $WORLD_SIZE --node_rank $RANK --master_addr $MASTER_ADDR"
        environment.refuse_other_nodes(of_pods, "--num_nodes 1")
    gpus = _count_gpus()
    slots = _slots(gpus, options)
    if not gpus:
        logger.info("no GPU on this machine, so on its cores (--num_gpus sets the number of ranks, %d)", slots)
    if options.no_ssh and options.num_nodes > 0:
        return {f"node {rank}": slots for rank in range(options.num_nodes)}, gpus > 0
    return {"localhost": slots}, gpus > 0


def _count_gpus() -> int:
    if environment.hides_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return 0
    import torch  # takes a second or two, and not every command line gets this far

    return torch.cuda.device_count()


def _slots(gpus: int, options: argparse.Namespace) -> int:
    """The number of ranks on a node with `gpus` GPUs."""
    return gpus or (options.num_gpus if options.num_gpus > 0 else CPU_RANKS)


def _run_here(options: argparse.Namespace, program: Program, nodes: Nodes, has_gpus: bool) -> int:
    """Runs the job on a single node, this one."""
    [(host, slots)] = nodes.items()
    where = ["--standalone", "--nnodes", "1"]  # the ranks meet at a free port
    if options.master_port or options.master_addr:
        where = static(1, 0, options.master_addr or "127.0.0.1", options.master_port or DEFAULT_PORT)
    return _run_torchrun(program, host, slots, where, has_gpus)


def _run_one_of_many(options: argparse.Namespace, program: Program, nodes: Nodes, has_gpus: bool) -> int:
    """Runs this node of a --no_ssh job, in which somebody else starts the other nodes."""
    rank = options.node_rank
    if rank >= len(nodes):
        raise ValueError(
            f"--node_rank {rank}: there are {len(nodes)} nodes, from 0 (--hostfile or --num_nodes says how many)."
        )
    host, slots = list(nodes.items())[rank]
    where = static(len(nodes), rank, options.master_addr, options.master_port or DEFAULT_PORT)
    return _run_torchrun(program, host, slots, where, has_gpus)


def _run_torchrun(program: Program, host: str, slots: list[int], where: Sequence[str], has_gpus: bool) -> int:
    """Runs torchrun on this node. It inherits the terminal's input, so that an interactive script works."""
    variables = environment.of_slots(slots, local=True, has_gpus=has_gpus)
    command = node_command(torchrun_command(program, len(slots), where), variables)
    _say({host: command}, {host: slots})
    return Node(command).wait()


def _run_many(options: argparse.Namespace, program: Program, nodes: Nodes, here: set[str], has_gpus: bool) -> int:
    """Runs one agent on each node: as a child of this process on this machine, over ssh elsewhere."""
    if len(here) < len(nodes) and shutil.which("ssh") is None:
        raise ValueError(
            "there is no `ssh` on this machine. With --no_ssh, start the same command on every node yourself."
        )
    first = next(iter(nodes))
    others = [host for host in nodes if host not in here and not _is_loopback(host)]
    if not options.master_addr and _is_loopback(first) and others:
        raise ValueError(
            f"the other nodes cannot reach {first!r}: give --master_addr, or write this host's name in the hostfile."
        )
    address, port = options.master_addr or first, options.master_port or DEFAULT_PORT
    shared = environment.exported()
    commands = {}
    for rank, (host, slots) in enumerate(nodes.items()):
        where = static(len(nodes), rank, address, port)
        variables = shared | environment.of_slots(slots, local=host in here, has_gpus=has_gpus)
        python = "python" if options.venv_script and host not in here else sys.executable
        agent = agent_command(torchrun_command(program, len(slots), where, python), obeys_stdin=True, python=python)
        commands[host] = node_command(agent, variables)
        if host not in here:
            commands[host] = remote_command(
                host,
                commands[host],
                os.getcwd(),
                ssh_port=options.ssh_port,
                launcher_args=shlex.split(options.launcher_args),
                venv_script=os.path.abspath(options.venv_script) if options.venv_script else "",
            )
    _say(commands, nodes)
    return run_nodes(commands)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _under_slurm(options: argparse.Namespace) -> bool:
    if options.launcher is not None or options.hostfile is not None or options.no_ssh or options.force_multi:
        return options.launcher == "slurm"
    return "SLURM_JOB_ID" in os.environ and _count_of("SLURM_JOB_NUM_NODES") > 1


def _count_of(variable: str) -> int:
    """The number in a Slurm variable, 1 if it is unset or empty."""
    text = os.environ.get(variable) or "1"
    if not text.isdecimal():
        raise ValueError(f"{variable}={text} is no number: unset it, or start megazero in an allocation that sets it.")
    return int(text)


def _run_slurm(options: argparse.Namespace, program: Program) -> int:
    """Replaces this process by srun, which forwards signals to the agents of all nodes and returns the highest exit status."""
    if _count_of("SLURM_STEP_NUM_TASKS") > 1:
        raise ValueError(
            "srun has started megazero on several nodes or tasks: start it once, and it calls srun itself."
        )
    if "SLURM_JOB_ID" not in os.environ:
        raise ValueError(
            "--launcher slurm needs an allocation (SLURM_JOB_ID is not set): start it inside sbatch or salloc."
        )
    if options.save_pid:  # srun, in this process's place, would leave the file
        raise ValueError(
            "--save_pid does not work under Slurm, which numbers its jobs: drop it, and use squeue and scancel."
        )
    gpus = slurm_gpus(os.environ) or _count_gpus()
    if not gpus and options.num_gpus < 1:
        raise ValueError(
            "this machine has no GPU, and neither SLURM_GPUS_ON_NODE nor SLURM_GPUS_PER_NODE says how many a node of the "
            "allocation has. Give --num_gpus, the number of ranks per node, or allocate with --gpus-per-node."
        )
    count = _slots(gpus, options)
    hosts = dict.fromkeys(slurm_hosts(os.environ.get("SLURM_JOB_NODELIST", "")), count)
    nodes = select(hosts, options.include, options.exclude, options.num_nodes, options.num_gpus)
    first = next(iter(nodes))
    slots = nodes[first]
    if any(other != slots for other in nodes.values()):
        raise ValueError(
            "--include and --exclude must leave the same slots on every node under Slurm: srun runs one command on all."
        )
    # A port of the job's own: at a port that another job's nodes have met at, c10d joins that job's store, which ends with it.
    port = options.master_port or 20000 + _count_of("SLURM_JOB_ID") % 10000
    endpoint = f"{options.master_addr or first}:{port}"
    agent = agent_command(
        torchrun_command(program, len(slots), c10d(len(nodes), endpoint, os.environ["SLURM_JOB_ID"])), obeys_stdin=False
    )
    narrowed = len(slots) < count  # otherwise the devices are those that Slurm gives the job
    variables = environment.from_files() | environment.of_slots(slots, local=False, has_gpus=narrowed)
    # srun would give a task as many GPUs as each of the job's was to have; its one task on a node needs those of all ranks
    all_gpus = ["--gpus-per-node", str(count)] if os.environ.get("SLURM_GPUS_PER_TASK") else []
    launcher_args = [*all_gpus, *shlex.split(options.launcher_args)]
    command = srun_command(list(nodes), node_command(agent, variables), launcher_args)
    _say({", ".join(nodes): command}, nodes)
    if shutil.which("srun") is None:
        raise ValueError("there is no `srun` on this machine.")
    os.execvp("srun", command)


def _say(commands: Mapping[str, Sequence[str]], nodes: Nodes) -> None:
    where = some([f"{host} ({len(slots)})" for host, slots in nodes.items()], 8)
    logger.info("%s on %s", counted(sum(map(len, nodes.values())), "rank"), where)
    for host, command in commands.items():
        logger.debug("%s: %s", host, shlex.join(command))


@contextmanager
def _pid_file() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.megazero"
    write_whole(path, str(os.getpid()).encode())  # takes the place of a link, if somebody has left one
    try:
        yield
    finally:
        path.unlink(missing_ok=True)

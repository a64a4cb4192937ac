"""The commands that make up a launch, as lists of arguments: nothing here runs anything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """What every rank runs, and how."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False  # `script` names a module, as for python -m
    no_python: bool = False  # `script` is an executable program
    local_rank: bool = True  # add --local_rank=N before the arguments
    log_dir: str = ""  # folder with a file for each rank's output, which then does not go to the terminal
    cores: str | None = None  # bind each rank to its share of these ("0-3,8"; "" is all that the node may use)


def static(nodes: int, node_rank: int, address: str, port: int) -> list[str]:
    """torchrun's options for node `node_rank` of a known number of nodes; the ranks meet at the first node."""
    return f"--nnodes {nodes} --node-rank {node_rank} --master-addr {address} --master-port {port}".split()


def c10d(nodes: int, endpoint: str, job: str) -> list[str]:
    """torchrun's options if they are the same on every node: the nodes meet at `endpoint` (host:port)."""
    return f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {job}".split()


def torchrun_command(program: Program, ranks: int, where: Sequence[str], python: str = sys.executable) -> list[str]:
    """The command that runs `ranks` ranks of a program on one node; `where` is --standalone, static(...) or c10d(...).

    In the arguments that it passes on, torchrun replaces ${local_rank}, and `$$` by `$`. The former gives the ranks their
    --local_rank; the latter is why the user's own dollar signs are doubled.
    """
    command = [python, "-m", "megazero.launch", *where, "--nproc-per-node", str(ranks)]
    if program.log_dir:
        command += ["--log-dir", program.log_dir, "--redirects", "3"]
    start = [program.script]
    if program.cores is not None:
        interpreter = [] if program.no_python else [python, "-u", *(["-m"] if program.module else [])]
        start = ["megazero.runner.bind", program.cores, *interpreter, program.script]
        command.append("--module")
    elif program.module:
        command.append("--module")
    elif program.no_python:
        command.append("--no-python")
    if not (program.no_python and program.cores is None):  # torchrun replaces nothing in the name of a program
        start = [_escape(part) for part in start]
    local_rank = ["--local_rank=${local_rank}"] if program.local_rank else []
    # "--" ends torchrun's own options; without it, torchrun would remove the first "--" among the user's
    return [*command, "--", *start, *local_rank, *map(_escape, program.args)]


def _escape(argument: str) -> str:
    return argument.replace("$", "$$")


def node_command(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command, run in an environment with these variables set."""
    return ["env", *(f"{key}={value}" for key, value in environment.items()), *command]


def agent_command(command: Sequence[str], obeys_stdin: bool, python: str = sys.executable) -> list[str]:
    """The command of the agent that runs `command` on a node (megazero.runner.agent)."""
    return [python, "-m", "megazero.runner.agent", *(["--obey-stdin"] if obeys_stdin else []), *command]


def remote_command(
    host: str,
    command: Sequence[str],
    cwd: str,
    *,
    ssh_port: int | None,
    launcher_args: Sequence[str],
    venv_script: str,
) -> list[str]:
    """The ssh command that runs `command` on `host` in the folder `cwd`, with every argument unchanged.

    ssh passes one string to the remote login shell, which must be of the Bourne family (sh, bash, zsh, ...).

    Args:
        ssh_port: the port on which sshd listens; None: as ssh's configuration specifies.
        launcher_args: further options for ssh.
        venv_script: a script to source there first, unless it is "".
    """
    port = ["-p", str(ssh_port)] if ssh_port else []
    activate = f". {shlex.quote(venv_script)} && " if venv_script else ""
    line = f"cd {shlex.quote(cwd)} && {activate}exec {shlex.join(command)}"
    return ["ssh", *port, *launcher_args, host, line]


def srun_command(hosts: Sequence[str], command: Sequence[str], launcher_args: Sequence[str]) -> list[str]:
    """The srun command that runs `command` once on each of `hosts`, and ends all of them when one fails."""
    count = str(len(hosts))
    # export=ALL: otherwise srun follows that of sbatch, and with NONE finds no `env`
    options = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--export=ALL", "--kill-on-bad-exit=1"]
    options.append("--cpu-bind=none")  # the one task of a node is torchrun, whose ranks share all its cores
    return ["srun", *options, "--nodelist", ",".join(hosts), *launcher_args, *command]

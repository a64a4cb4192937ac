"""The command line of `megazero`: the options of DeepSpeed's launcher, the script, and the script's own arguments, unchanged."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence

from megazero.option import Parser
from megazero.runner.commands import Program

HOSTFILE = "/job/hostfile"
_AUTOTUNING = "there is no autotuner. Drop it, and set the batch size and the ZeRO stage yourself"
_ELASTIC = "a job has a fixed number of ranks. Drop it; a checkpoint resumes on any other number of them"
_SRUN = "it is an option of srun. Give it in --launcher_args, for example --launcher_args '--account NAME'"
REFUSED = {
    "--autotuning": _AUTOTUNING,
    "--elastic_training": _ELASTIC,
    "--min_elastic_nodes": _ELASTIC,
    "--max_elastic_nodes": _ELASTIC,
    "--account": _SRUN,
    "--comment": _SRUN,
}
MPI_LAUNCHERS = ("openmpi", "mpich", "impi", "mvapich", "jsrun")
LAUNCHERS = ("pdsh", "ssh", "slurm", "torchrun", "local")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def make_parser() -> Parser:
    """The parser of the launcher's own options."""
    parser = Parser(
        prog="megazero",
        usage="megazero [options] script.py [the script's arguments]",
        description="Runs a script on many ranks, with torchrun on every node.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="help", help="show this help and exit")
    add(
        "-H",
        "--hostfile",
        help=f"file of lines `host slots=N` (default: {HOSTFILE} if it exists, else only this machine)",
    )
    add("-i", "--include", default="", help="use only these: host or host:0,2, several joined by @")
    add("-e", "--exclude", default="", help="use all but these, in the form of --include")
    add("--num_nodes", type=int, default=-1, help="use the first N hosts")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each host: its first N slots")
    add("--master_addr", default="", help="address where the ranks meet (default: the first host)")
    add(
        "--master_port",
        type=int,
        help="port where they meet (default: 29500 on several nodes, a free one on a single node)",
    )
    launchers = "pdsh or ssh (the default, both over ssh), slurm (over srun), torchrun (on this machine only)"
    add("--launcher", type=str.lower, help=launchers)
    add("--launcher_args", default="", help="further options for ssh or srun, in one string")
    add("--no_ssh_check", action="store_true", help="no effect: no host is tried before the job starts")
    add("--force_multi", action="store_true", help="use ssh even for a single host, or for this machine")
    add("--ssh_port", type=int, help="port of sshd on the other hosts")
    add("--venv_script", default="", help="script to source on hosts reached over ssh, whose `python` is then used")
    no_ssh = "start this node only: run the same command, with --node_rank, on every node"
    add("--no_ssh", action="store_true", help=no_ssh)
    add("--node_rank", type=int, default=-1, help="with --no_ssh: which of the nodes this is, from 0")
    add("--module", action="store_true", help="the script is a module, as for python -m")
    add("--no_python", action="store_true", help="the script is an executable program")
    add("--no_local_rank", action="store_true", help="do not add --local_rank=N to the script's arguments")
    add("--enable_each_rank_log", default="", metavar="DIR", help="write each rank's output to its own file in DIR")
    add("--bind_cores_to_rank", action="store_true", help="give each rank its own share of the node's cores")
    add("--bind_core_list", default="", metavar="LIST", help="cores to share out, such as 0-7,16-23 (default: all)")
    add("--save_pid", action="store_true", help="keep this process's id in <tmp>/<id>.megazero while it runs")
    log_level = "level of the launcher's own messages; debug shows its commands"
    add("--log_level", default="info", choices=LOG_LEVELS, help=log_level)
    add("-q", "--quiet", dest="log_level", action="store_const", const="error", help="--log_level error")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Program]:
    """The launcher's options, and the program that they start.

    Raises:
        ValueError: an option is unknown, refused or contradicts another; or there is no script, or it does not exist.
    """
    parser = make_parser()
    own, rest = split(argv, parser.takes_value)
    options = parser.parse_args(own)
    _check(options)
    if not rest:
        raise ValueError("no script is given: megazero [options] script.py [the script's arguments].")
    program = Program(
        script=rest[0],
        args=tuple(rest[1:]),
        module=options.module,
        no_python=options.no_python,
        local_rank=not options.no_local_rank,
        log_dir=options.enable_each_rank_log,
        cores=options.bind_core_list if options.bind_cores_to_rank else None,
    )
    _check_script(program)
    return options, program


def split(argv: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The launcher's own options as `--name=value`, and everything after them: the script and its arguments, unchanged.

    argparse cannot do this: it removes a `--`, and takes an unknown option's value for the script.
    """
    own, at = [], 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        name, equals, _ = argv[at].partition("=")
        if name in REFUSED:
            raise ValueError(f"{name} is not supported: {REFUSED[name]}.")
        if name not in takes_value:
            near = difflib.get_close_matches(name.replace("-", "_").replace("__", "--", 1), takes_value, n=1)
            meant = f" Did you mean {near[0]}?" if near else " `megazero --help` lists the options."
            raise ValueError(f"unknown option {name}.{meant} The script's own options belong after the script.")
        if takes_value[name] and not equals:
            if argv[at + 1 : at + 2] in ([], ["--"]):
                raise ValueError(f"{name} needs a value.")
            own.append(f"{name}={argv[at + 1]}")  # one word, so that the value may begin with a dash
            at += 2
        else:
            own.append(argv[at])
            at += 1
    return own, list(argv[at + (at < len(argv) and argv[at] == "--") :])


def parse_cores(text: str) -> list[int]:
    """The cores in a list like `0-3,8`.

    Raises:
        ValueError: the syntax is wrong, or a core is named twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"--bind_core_list {text!r}: {part!r} is neither a core nor a range like 0-3.")
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(cores)) < len(cores):
        raise ValueError(f"--bind_core_list {text!r} names a core twice.")
    return cores


def _check(options: argparse.Namespace) -> None:
    if options.launcher in MPI_LAUNCHERS:
        raise ValueError(
            f"--launcher {options.launcher} is not supported: torchrun starts the ranks here, not MPI. Use --launcher ssh, or "
            "start one `megazero --no_ssh --node_rank N --master_addr HOST ...` per node yourself."
        )
    if options.launcher is not None and options.launcher not in LAUNCHERS:
        raise ValueError(f"--launcher {options.launcher!r}: choose one of {', '.join(LAUNCHERS)}.")
    if options.module and options.no_python:
        raise ValueError("--module and --no_python cannot be given together: a module needs Python.")
    for name, port in (("--master_port", options.master_port), ("--ssh_port", options.ssh_port)):
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"{name} {port}: a port is a number from 1 to 65535.")
    if options.no_ssh and (options.force_multi or options.launcher not in (None, "torchrun", "local")):
        raise ValueError("--no_ssh starts this node only; drop --force_multi and --launcher.")
    if options.no_ssh and (options.node_rank < 0 or not options.master_addr):
        raise ValueError(
            "--no_ssh needs --node_rank (which node this is, from 0) and --master_addr (the first node's address)."
        )
    if not options.no_ssh and options.node_rank != -1:
        raise ValueError("--node_rank belongs to --no_ssh; else the hostfile's order is the order of the nodes.")
    if options.bind_core_list and not options.bind_cores_to_rank:
        raise ValueError("--bind_core_list has no effect without --bind_cores_to_rank.")
    if options.bind_core_list:
        parse_cores(options.bind_core_list)
    try:
        shlex.split(options.launcher_args)
    except ValueError as error:
        raise ValueError(f"--launcher_args {options.launcher_args!r}: {error}.") from None


def _check_script(program: Program) -> None:
    if program.no_python and shutil.which(program.script) is None:
        raise ValueError(f"the program {program.script} does not exist, or is not executable.")
    if not program.no_python and not program.module and not os.path.isfile(program.script):
        raise ValueError(f"the script {program.script} does not exist in {os.getcwd()}.")

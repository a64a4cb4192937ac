"""The command `megazero`: its translation as pure functions, then small real jobs, with stand-ins for ssh and srun."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from megazero import launch, runner
from megazero.cgroups import available_cores
from megazero.children import children
from megazero.runner import bind, main, processes
from megazero.runner.arguments import REFUSED, make_parser, parse, parse_cores
from megazero.runner.commands import Program, node_command, remote_command, srun_command, static, torchrun_command
from megazero.runner.environment import exported, parse_environment, visible_devices
from megazero.runner.hosts import is_this_machine, parse_hostfile, select, slurm_gpus
from megazero.runner.processes import run_nodes
from tests.ranks import free_port

ROOT = Path(__file__).parent.parent
HOSTS = {"worker-0": 4, "worker-1": 4}
ALL = [0, 1, 2, 3]

# What a user may type after the script; all of it must arrive as it is.
NASTY = [
    "two words",
    "it's",
    'a "quote"',
    "$HOME",
    "$$",
    "${local_rank}",
    "`date`",
    "back\\slash",
    '{"zero": {"stage": 2, "x": [1, null]}}',
    "",
    "--",
    "-h",
    "--nnodes=3",
    "--hostfile",
    "*",
    "a;b&&c|d>e#f!g",
    "line\nbreak",
    "é",
]

SHOW = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES OMP_NUM_THREADS FROM_FILE".split()
shown = dict(argv=sys.argv, cores=len(os.sched_getaffinity(0)), **{n: os.environ.get(n) for n in names})
os.write(1, (json.dumps(shown) + "\\n").encode())  # one write, so that lines of several ranks do not mix
"""


# ---------------------------------------------------------------- hostfile, include, exclude


def test_hostfile_with_comments_and_blank_lines():
    text = "# all of them\n\nworker-0 slots=4\n  worker_1.cluster\tslots=8  # the big one\n"
    assert parse_hostfile(text) == {"worker-0": 4, "worker_1.cluster": 8}


@pytest.mark.parametrize(
    "text, said",
    [
        ("worker-0 slots=4\nworker-1\n", "hostfile line 2: 'worker-1'"),
        ("worker-0 slots=x", "hostfile line 1: 'worker-0 slots=x'"),
        ("worker-0 slots=0", "with N of 1 or more"),
        ("worker-0 4", "hostfile line 1"),
        ("this is not a hostfile", "hostfile line 1"),
        ("-oProxyCommand=x slots=4", "hostfile line 1"),
        ("-v slots=4", "hostfile line 1"),  # an option of ssh
        ("user@worker-0 slots=4", "belongs in ~/.ssh/config"),
        ("$(id) slots=4", "a host of letters, digits"),
        ("a;b slots=4", "a host of letters, digits"),
        ("a slots=4\n\na slots=2", "line 3: 'a slots=2' names the host a a second time"),
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
    ],
)
def test_malformed_hostfile_is_told_with_its_line(text, said):
    with pytest.raises(ValueError) as error:
        parse_hostfile(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "filters, nodes",
    [
        ({}, {"worker-0": ALL, "worker-1": ALL}),
        ({"include": "worker-1"}, {"worker-1": ALL}),
        ({"include": "worker-1:2,0@worker-0:3"}, {"worker-0": [3], "worker-1": [0, 2]}),
        ({"include": "worker-1:1,1@worker-1:3"}, {"worker-1": [1, 3]}),
        ({"exclude": "worker-1"}, {"worker-0": ALL}),
        ({"exclude": "worker-0:0,3@worker-1:1"}, {"worker-0": [1, 2], "worker-1": [0, 2, 3]}),
        ({"exclude": "worker-0:0,1,2,3"}, {"worker-1": ALL}),
        ({"num_nodes": 1}, {"worker-0": ALL}),
        ({"num_gpus": 2}, {"worker-0": [0, 1], "worker-1": [0, 1]}),
        ({"num_nodes": 1, "num_gpus": 1}, {"worker-0": [0]}),
    ],
)
def test_selected_slots_in_the_order_of_the_hostfile(filters, nodes):
    found = select(HOSTS, **filters)
    assert found == nodes and list(found) == list(nodes)


@pytest.mark.parametrize(
    "filters, said",
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "--include and --exclude cannot be given together"),
        ({"include": "jeff"}, "no host 'jeff' among worker-0 (slots=4), worker-1 (slots=4)"),
        ({"exclude": "worker-0@jeff"}, "no host 'jeff'"),
        ({"include": "worker-0:4"}, "worker-0 has the slots 0 to 3, and no slot 4"),
        ({"exclude": "worker-0:0,9"}, "no slot 9"),
        ({"include": "worker-0:1;2"}, "'worker-0:1;2' is not of the form"),
        ({"include": "worker-0:"}, "is not of the form"),
        ({"include": "worker-0:1,"}, "is not of the form"),
        ({"include": "worker-0@@worker-1"}, "'' is not of the form"),
        ({"include": "worker-0:a"}, "is not of the form"),
        ({"exclude": "worker-0@worker-1"}, "leaves nothing"),
        ({"num_nodes": 3}, "--num_nodes 3: only worker-0 (slots=4), worker-1 (slots=4)"),
        ({"num_gpus": 5}, "--num_gpus 5: worker-0 has only 4"),
        ({"num_gpus": 0}, "use 1 or more"),
        ({"num_nodes": -2}, "use 1 or more"),
        ({"num_nodes": 1, "include": "worker-0"}, "--num_nodes cannot be given with --include or --exclude"),
        ({"num_gpus": 1, "exclude": "worker-0"}, "--num_gpus cannot be given with --include or --exclude"),
    ],
)
def test_wrong_selection_is_told(filters, said):
    with pytest.raises(ValueError) as error:
        select(HOSTS, **filters)
    assert said in str(error.value)


def test_slots_count_within_the_visible_devices():
    assert visible_devices([1, 3], None) == "1,3"
    assert visible_devices([0, 2], "4,5,GPU-abc") == "4,GPU-abc"
    for hidden in ("", "-1", "NoDevFiles"):
        assert visible_devices([0, 1], hidden) == hidden, "GPUs that are switched off stay off"
    with pytest.raises(ValueError, match="slot 2 does not exist: CUDA_VISIBLE_DEVICES=4,5 leaves 2 devices"):
        visible_devices([2], "4,5")


def test_other_nodes_get_the_settings_of_torch_and_of_what_carries_data(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": "/code",
        "PYTHONHASHSEED": "0",
        "MLFLOW_TRACKING_URI": "http://node0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    secrets = ("TRACKING_TOKEN", "TRACKING_PASSWORD", "CRYPTO_KEK_PASSPHRASE", "TRACKING_CLIENT_KEY")
    others = {"CUDA_VISIBLE_DEVICES": "3", "SECRET": "1"} | {f"MLFLOW_{name}": "1" for name in secrets}
    for key, value in {**wanted, **others, "PYTHONHASHSEED": "1"}.items():
        monkeypatch.setenv(key, value)
    (tmp_path / ".deepspeed_env").write_text("PYTHONHASHSEED=0\n")
    found = exported()
    assert wanted.items() <= found.items() and not {*others, "HOME"} & found.keys()


def test_a_user_without_a_home_has_the_file_of_the_working_folder_only(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # as in a container: it is in no list of users
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=1\n")
    assert exported()["FROM_FILE"] == "1"
    monkeypatch.setenv("HOME", f"/{'x' * 300}")  # the kernel refuses to look there, as in root's for another user
    assert exported()["FROM_FILE"] == "1"


def test_environment_file():
    assert parse_environment("# keys\n\nA=1\nNCCL_X=a b = c\nEMPTY=\n") == {"A": "1", "NCCL_X": "a b = c", "EMPTY": ""}
    for wrong in ("A=1\nexport B=2", "A=1\nB", "A=1\n=2"):
        with pytest.raises(ValueError, match="line 2"):
            parse_environment(wrong)


def test_this_machine_is_known_by_its_addresses():
    assert is_this_machine("localhost") and is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1"), "an address that is reserved for documentation"
    assert not is_this_machine("x" * 64), "no name of DNS, but one may be in ssh's configuration"


def test_an_address_of_a_family_that_the_kernel_lacks_is_none_of_this_machine(monkeypatch):
    kind, unknown = socket.SOCK_STREAM, 999  # stands for IPv6 under ipv6.disable=1, with ::1 in /etc/hosts
    found = [(unknown, kind, 0, "", ("::1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: found)
    assert not is_this_machine("localhost")
    found += [(socket.AF_INET, kind, 0, "", ("127.0.0.1", 0))]
    assert is_this_machine("localhost")


def test_cores():
    assert parse_cores("0-2,8") == [0, 1, 2, 8]
    assert [bind.share([0, 1, 2, 8, 9], rank, 2) for rank in (0, 1)] == [[0, 1], [2, 8]]
    for wrong in ("", "a", "3-1", "1,1", "1;2"):
        with pytest.raises(ValueError, match="--bind_core_list"):
            parse_cores(wrong)
    with pytest.raises(ValueError, match="3 ranks on a node cannot each have one of 2 cores"):
        bind.share([0, 1], 0, 3)


# ---------------------------------------------------------------- commands


def test_torchrun_command_adds_local_rank_and_protects_dollars():
    command = torchrun_command(
        Program("train.py", ("--x", "$HOME")), 4, static(2, 1, "worker-0", 29500), python="python"
    )
    options, program = command[: command.index("--")], command[command.index("--") + 1 :]
    assert options[:3] == ["python", "-m", "megazero.launch"] and options[-2:] == ["--nproc-per-node", "4"]
    assert options[5:11] == ["--node-rank", "1", "--master-addr", "worker-0", "--master-port", "29500"]
    assert program == ["train.py", "--local_rank=${local_rank}", "--x", "$$HOME"]


@pytest.mark.parametrize(
    "how, options, program",
    [
        ({"module": True}, ["--module"], ["a.b", "--local_rank=${local_rank}"]),
        ({"no_python": True, "local_rank": False}, ["--no-python"], ["a.b"]),
        ({"log_dir": "logs"}, ["--log-dir", "logs", "--redirects", "3"], ["a.b", "--local_rank=${local_rank}"]),
        (
            {"cores": "0-3", "local_rank": False},
            ["--module"],
            ["megazero.runner.bind", "0-3", "python", "-u", "a.b"],
        ),
        (
            {"cores": "", "no_python": True, "local_rank": False},
            ["--module"],
            ["megazero.runner.bind", "", "a.b"],
        ),
    ],
)
def test_ways_to_start_a_program(how, options, program):
    command = torchrun_command(Program("a.b", **how), 2, ["--standalone"], python="python")
    assert command == [
        "python",
        "-m",
        "megazero.launch",
        "--standalone",
        "--nproc-per-node",
        "2",
        *options,
        "--",
        *program,
    ]


def test_remote_command_survives_a_shell(tmp_path):
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    show = [
        sys.executable,
        "-c",
        "import os, sys, json; print(json.dumps([os.getcwd(), os.environ['V'], sys.argv[1:]]))",
    ]
    (tmp_path / "activate").write_text("export SOURCED=1")
    shown = node_command([*show, *NASTY], {"V": "a 'b' $c"})
    more = {"ssh_port": 2222, "launcher_args": ["-v"], "venv_script": str(tmp_path / "activate")}
    command = remote_command("worker-1", shown, str(folder), **more)
    assert command[:5] == ["ssh", "-p", "2222", "-v", "worker-1"] and len(command) == 6
    for shell in ("bash", "sh"):
        done = subprocess.run([shell, "-c", command[5]], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [str(folder), "a 'b' $c", NASTY]


def test_srun_command():
    command = srun_command(["n1", "n2"], ["python"], ["--mem=0"])
    assert command[0] == "srun" and command[-2:] == ["--mem=0", "python"] and "--kill-on-bad-exit=1" in command
    assert command[command.index("--nodelist") + 1] == "n1,n2" and command[command.index("--ntasks") + 1] == "2"
    assert "--export=ALL" in command  # else, srun follows that of sbatch
    assert command[command.index("--ntasks-per-node") + 1] == "1" and "--cpu-bind=none" in command


@pytest.mark.parametrize("is_macos", [False, True])
def test_children_of_a_process(is_macos, monkeypatch, tmp_path):
    if is_macos:  # which has no /proc
        monkeypatch.setattr("megazero.children.PROC", tmp_path)
    ours = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        assert {child.pid for child in ours} <= set(children(os.getpid()))
        assert children(ours[0].pid) == []
    finally:
        for child in ours:
            child.kill()
            child.wait()


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_a_process_whose_name_is_cut_off_within_a_letter_disturbs_nobody():
    rename = "open('/proc/self/comm', 'wb').write('fünfzehnByte ü'.encode()[:15])"  # the kernel keeps no more
    code = f"import time; {rename}; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() and other.pid in children(os.getpid())
        finally:
            other.kill()


def test_status_of_many_nodes_is_that_of_the_cause(tmp_path, monkeypatch):
    until_end = ["sh", "-c", f"cat; touch {tmp_path}/ended"]  # an agent that is ended by the end of its input
    assert run_nodes({"a": ["true"], "b": ["true"]}) == 0
    assert run_nodes({"a": until_end, "b": ["sh", "-c", "exit 3"]}) == 3
    assert (tmp_path / "ended").exists(), "the pipe was closed, which ends a; its process is killed only later"
    # a lost its partner and reports first; b had the rank that was killed
    monkeypatch.setattr(processes, "GRACE_S", 100.0)  # b may be slow
    assert run_nodes({"a": ["sh", "-c", "exit 1"], "b": ["sh", "-c", "sleep 0.5; exit 137"]}) == 137


def test_there_may_be_more_nodes_than_a_process_may_usually_have_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 10, hard))
    try:
        assert run_nodes({f"host{number}": ["true"] for number in range(20)}) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------- the command line


def test_everything_after_the_script_is_the_scripts():
    options, program = parse(["--num_accelerators", "3", "--launcher_args", "-v", "-q", __file__, *NASTY])
    assert (options.num_gpus, options.launcher_args, options.log_level) == (3, "-v", "error")
    assert program.script == __file__ and list(program.args) == NASTY
    assert list(parse(["--", __file__, "--"])[1].args) == ["--"]


DEEPSPEEDS = """-H --hostfile -i --include -e --exclude --num_nodes --num_gpus --num_accelerators --master_port --master_addr
--launcher --launcher_args --force_multi --module --no_python --no_local_rank --no_ssh --no_ssh_check --node_rank --save_pid
--enable_each_rank_log --bind_cores_to_rank --bind_core_list --ssh_port --venv_script --log_level -q --quiet
--elastic_training --min_elastic_nodes --max_elastic_nodes --autotuning --account --comment""".split()


def test_every_option_of_deepspeeds_launcher_is_known_or_refused_by_name():
    known = make_parser().takes_value.keys() | REFUSED.keys()
    assert not set(DEEPSPEEDS) - known
    assert parse(["--no_ssh_check", "--launcher", "SLURM", __file__])[0].launcher == "slurm"


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "no script is given"),
        (["--num_gpus"], "--num_gpus needs a value"),
        (["--master_port", "--", "x.py"], "--master_port needs a value"),
        (["--launcher_args=--", "x.py"], "argument --launcher_args: -- is no value"),
        (["--num_gpus", "two", "x.py"], "invalid int value: 'two'"),
        (["--num_gpu", "2", "x.py"], "unknown option --num_gpu. Did you mean --num_gpus?"),
        (["--num-gpus=2", "x.py"], "Did you mean --num_gpus?"),
        (["--deepspeed", "x.py"], "The script's own options belong after the script"),
        (["nowhere.py"], "the script nowhere.py does not exist in "),
        (["--no_python", "no-such-program"], "the program no-such-program does not exist"),
        (["--module", "--no_python", "x"], "--module and --no_python cannot be given together"),
        (["--launcher", "openmpi", "x.py"], "--launcher openmpi is not supported"),
        (["--launcher", "carrier-pigeon", "x.py"], "choose one of pdsh, ssh, slurm"),
        (["--autotuning", "run", "x.py"], "--autotuning is not supported: there is no autotuner"),
        (["--elastic_training", "x.py"], "--elastic_training is not supported"),
        (["--launcher", "OpenMPI", "x.py"], "--launcher openmpi is not supported"),
        (["--account=me", "x.py"], "--account is not supported: it is an option of srun"),
        (["--master_port", "70000", "x.py"], "--master_port 70000"),
        (["--node_rank", "1", "x.py"], "--node_rank belongs to --no_ssh"),
        (["--no_ssh", "x.py"], "--no_ssh needs --node_rank"),
        (["--launcher_args", "it's", "x.py"], "--launcher_args"),
        (["--bind_core_list", "0-3", "x.py"], "no effect without --bind_cores_to_rank"),
        (["-H", "nowhere", __file__], "--hostfile nowhere cannot be read (No such file or directory)"),
        (["-H", __file__, __file__], "hostfile line 1: "),
        (["--launcher", "slurm", __file__], "needs an allocation"),
        (["--no_ssh", "--num_nodes=2", "--node_rank=2", "--master_addr=a", __file__], "there are 2 nodes, from 0"),
        (["--num_nodes=2", __file__], "--num_nodes 2: only localhost (slots="),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_status_2(argv, said, capsys):
    assert main(argv) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1 and said in output, output


@pytest.mark.parametrize(
    "variable, said", [("WORLD_SIZE", "Set --no_ssh --num_nodes $WORLD_SIZE"), ("PET_NNODES", "megazero.launch")]
)
def test_a_pod_of_several_does_not_train_by_itself(monkeypatch, capsys, variable, said):
    monkeypatch.setenv(variable, "2")
    assert main([__file__]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {variable}=2 in the environment: ") and said in output, output


# ---------------------------------------------------------------- real jobs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, outside of Slurm; ssh, srun and scontrol there are stand-ins that run all on this machine."""
    stand_ins = {
        "ssh": 'while [[ $1 == -* ]]; do [[ $1 == -p ]] && shift; shift; done\necho "$1" >> ssh.log; shift; exec bash -c "$*"',
        "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
        "srun": 'while [[ $1 == -* ]]; do [[ $1 == *=* ]] || shift; shift; done\n"$@" & "$@" & wait -n && wait -n',
    }
    for name, body in stand_ins.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMP_NUM"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # to count GPUs takes seconds
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def start(
    folder: Path, script: str, *options: str, name: str = "script.py", args: list[str] | None = None
) -> subprocess.Popen:
    """Starts `megazero OPTIONS script.py ARGS` in `folder`."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "megazero.runner", *options, name, *(args or [])]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, status: int = 0) -> tuple[str, str]:
    """Output and messages of a job that must end with `status`."""
    try:
        output, messages = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == status, output + messages
    return output, messages


def shown(output: str) -> list[dict]:
    """What SHOW has printed, by rank; gloo of torch 2.8 prints lines of its own, of several ranks at once."""
    lines = (line for line in output.splitlines() if line and "peer ranks" not in line)
    return sorted(map(json.loads, lines), key=lambda rank: int(rank["RANK"]))


def two_hosts(folder: Path, slots: tuple[int, int] = (1, 1)) -> list[str]:
    (folder / "hosts").write_text(f"node-a slots={slots[0]}\nnode-b slots={slots[1]}\n")
    meet = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    return ["-H", "hosts", "--force_multi", *meet]  # forced: these names need not be looked up


def test_of_hundreds_of_nodes_a_few_are_named(monkeypatch):
    said = []
    monkeypatch.setattr(runner.logger, "info", lambda text, *values: said.append(text % values))
    runner._say({}, {f"node{number}": list(range(8)) for number in range(512)})
    assert said == ["4096 ranks on " + ", ".join(f"node{number} (8)" for number in range(8)) + " and 504 more"]


def test_two_ranks_on_a_machine_without_gpus(folder, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    output, messages = finish(start(folder, SHOW, "--num_gpus=2", "--bind_cores_to_rank", args=NASTY))
    ranks = shown(output)
    assert [r["argv"] for r in ranks] == [["script.py", f"--local_rank={i}", *NASTY] for i in (0, 1)]
    assert [(r["LOCAL_RANK"], r["WORLD_SIZE"], r["LOCAL_SIZE"]) for r in ranks] == [("0", "2", "2"), ("1", "2", "2")]
    assert {r["MASTER_ADDR"] for r in ranks} == {"127.0.0.1"}, "no name need resolve"
    cores = len(os.sched_getaffinity(0)) // 2
    threads = str(max(1, available_cores() // 2))  # a container may have a quota
    assert all(r["cores"] == cores and r["OMP_NUM_THREADS"] == threads and r["MASTER_PORT"] for r in ranks)
    assert "2 ranks on localhost (2)" in messages and "OMP_NUM_THREADS" not in messages


def test_a_node_that_is_to_work_alone_waits_for_no_other(folder, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    output, _ = finish(start(folder, SHOW, "--num_nodes=1", "--num_gpus=1"))
    assert [r["WORLD_SIZE"] for r in shown(output)] == ["1"]


def test_a_system_that_cannot_bind_a_process_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bind", "", "true"])
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(SystemExit, match="error: --bind_cores_to_rank: linux cannot bind .* Drop it"):
        bind.main()


def test_a_host_of_the_hostfile_that_is_this_machine_needs_no_ssh(folder, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (folder / "hosts").write_text("localhost slots=4\nnode-b slots=4\n")
    options = ["-H", "hosts", "-i", "localhost:1,3", "--no_local_rank", "--module"]
    ranks = shown(finish(start(folder, SHOW, *options, name="script", args=["--", "x"]))[0])
    assert [r["CUDA_VISIBLE_DEVICES"] for r in ranks] == ["1,3", "1,3"] and ranks[0]["argv"][1:] == ["--", "x"]
    assert not (folder / "ssh.log").exists()


def test_each_rank_has_a_log_and_failure_names_it(folder):
    script = """
import os, sys, time
print("hello", flush=True)
if os.environ["RANK"] == "0":
    open("said", "w").close()
while not os.path.exists("said"):  # torchrun ends rank 0 as soon as rank 1 has failed
    time.sleep(0.01)
sys.exit(3 * int(os.environ["RANK"]))
"""
    output, messages = finish(start(folder, script, "--enable_each_rank_log", "logs"), status=3)
    assert "rank 1 ended with exit status 3; its message is under logs" in messages and "hello" not in output
    assert [log.read_text() for log in sorted((folder / "logs").rglob("stdout.log"))] == ["hello\n"] * 2


def test_killed_rank_is_named_and_ends_the_partners_on_other_nodes(folder):
    script = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""
    started = time.monotonic()
    _, messages = finish(start(folder, script, *two_hosts(folder)), status=128 + signal.SIGKILL)
    assert "rank 1 was killed (SIGKILL), most likely by the kernel for lack of host memory" in messages
    assert "host node-b ended with exit status 137; all nodes were ended" in messages
    assert time.monotonic() - started < 100 and "Traceback" not in messages


def test_two_nodes_meet_over_ssh_and_the_first_failure_is_the_status(folder):
    script = f"""{SHOW}
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
assert x.item() == 6
if dist.get_rank() == 2:
    os._exit(3)  # torch may abort in an exit with a process group
try:
    dist.all_reduce(x)
finally:  # it fails for lack of a partner, and is ended long before it would say so
    time.sleep(100)
"""
    (folder / ".deepspeed_env").write_text("FROM_FILE=a 'b' $c\n")
    options = two_hosts(folder, slots=(1, 2))
    output, messages = finish(start(folder, script, *options, args=NASTY), status=3)
    ranks = shown(output)
    assert [(r["RANK"], r["LOCAL_RANK"], r["LOCAL_SIZE"]) for r in ranks] == [
        ("0", "0", "1"),
        ("1", "0", "2"),
        ("2", "1", "2"),
    ]
    assert all(r["argv"][2:] == NASTY and r["FROM_FILE"] == "a 'b' $c" and r["WORLD_SIZE"] == "3" for r in ranks)
    assert [(r["MASTER_ADDR"], r["CUDA_VISIBLE_DEVICES"]) for r in ranks[1:]] == [("127.0.0.1", "0,1")] * 2
    assert sorted((folder / "ssh.log").read_text().split()) == ["node-a", "node-b"]
    assert "host node-b ended with exit status 3" in messages


def test_ssh_that_cannot_connect_is_told(folder):
    (folder / "bin" / "ssh").write_text("#!/bin/sh\necho no route >&2; exit 255\n")
    _, messages = finish(start(folder, SHOW, *two_hosts(folder)), status=255)
    assert "no route" in messages and "255 is also ssh's own status" in messages


@pytest.mark.parametrize(
    "many, number", [(False, signal.SIGTERM), (True, signal.SIGINT)], ids=["SIGTERM here", "Ctrl-C on two nodes"]
)
def test_a_signal_lets_every_rank_finish_and_save(folder, many, number):
    script = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    os.write(1, b"saved\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.1)
"""
    process = start(folder, script, "--save_pid", *(two_hosts(folder) if many else []))
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    pid_file = Path(tempfile.gettempdir()) / f"{process.pid}.megazero"
    os.kill(int(pid_file.read_text()), number)
    output, messages = finish(process)
    assert output == "saved\n" * 2 and not pid_file.exists()
    assert f"megazero: the launcher got {number.name}: " in messages, messages


@pytest.mark.parametrize(
    "command",
    [
        ["runner", "--num_gpus", "1", "--no_python", "--no_local_rank"],
        ["runner", "--num_gpus", "1", "--no_python", "--no_local_rank", "--force_multi"],
        ["runner.agent"],
        ["launch", "--standalone", "--no-python"],
    ],
    ids=["one node", "nodes", "agent", "torchrun"],
)
def test_a_failure_is_seen_where_a_daemon_that_ignores_the_end_of_its_children_started_the_job(folder, command):
    module, *options = command
    (program := folder / "fails").write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    job = [sys.executable, "-m", f"megazero.{module}", *options, str(program)]
    start = [sys.executable, "-c", ignoring, *job]
    assert subprocess.run(start, cwd=folder).returncode == 3


@pytest.mark.parametrize("under_nohup", [False, True])
def test_a_terminal_that_is_closed_stops_the_ranks_unless_nohup_has_started_the_job(folder, under_nohup):
    script = f"""
import os, signal, time
launcher = open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[1]
os.kill(int(launcher), signal.SIGHUP)
time.sleep({1 if under_nohup else 60})
os.write(1, b"went on\\n")
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        process = start(folder, script, "--num_gpus=1")
    finally:
        signal.signal(signal.SIGHUP, before)
    output, _ = finish(process, status=0 if under_nohup else 128 + signal.SIGTERM)
    assert output == ("went on\n" if under_nohup else "")


@pytest.mark.parametrize(
    "many, number",
    [
        pytest.param(True, signal.SIGKILL, id="SIGKILL on two nodes"),
        pytest.param(False, signal.SIGKILL, id="SIGKILL here"),
        pytest.param(True, signal.SIGQUIT, id="SIGQUIT on two nodes", marks=pytest.mark.slow),
        pytest.param(False, signal.SIGQUIT, id="SIGQUIT here"),
    ],
)
def test_ranks_end_when_the_launcher_is_killed(folder, many, number):
    script = "import os, time; os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(100)"
    process = start(folder, script, *(two_hosts(folder) if many else []))
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    assert all(ends_within(30, pid) for pid in ranks)
    _, messages = process.communicate()
    if number == signal.SIGQUIT:
        assert process.returncode == 128 + signal.SIGTERM and "torchrun was ended by SIGTERM" in messages, messages


def test_torchrun_ends_with_a_launcher_that_is_killed_while_torch_is_imported(folder, monkeypatch):
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        "import os, time; os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(100)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    agent = [sys.executable, "-m", "megazero.runner.agent", sys.executable, "-m", "megazero.launch", "script.py"]
    process = subprocess.Popen(agent, cwd=folder, stdout=subprocess.PIPE, text=True)
    torchrun = int(process.stdout.readline())
    process.kill()
    assert ends_within(30, torchrun)
    process.communicate()


def test_torchrun_ends_with_a_launcher_that_is_killed_before_its_python_runs(folder):
    agent = [sys.executable, "-m", "megazero.runner.agent", "sh", "-c", "echo $$; exec sleep 100"]
    process = subprocess.Popen(agent, cwd=folder, stdout=subprocess.PIPE, text=True)
    torchrun = int(process.stdout.readline())
    process.kill()
    assert ends_within(30, torchrun)
    process.communicate()


def test_torchrun_that_ends_while_it_starts_its_ranks_leaves_none(folder):
    script = folder / "rank.sh"  # starts at once, while torchrun starts the others
    script.write_text('#!/bin/sh\necho $$\n[ "$RANK" = 0 ] && kill -TERM $PPID\nexec sleep 100\n')
    script.chmod(0o755)
    options = ["--standalone", "--nproc-per-node", "20", "--no-python", str(script)]
    command = [sys.executable, "-m", "megazero.launch", *options]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=60
    )  # until nobody holds the pipe any more
    ranks = [int(pid) for pid in done.stdout.split()]
    assert ranks and done.returncode == 128 + signal.SIGTERM
    assert all(ends_within(30, pid) for pid in ranks)


def ends_within(seconds: float, pid: int) -> bool:
    """Whether the process ends in time, be it a zombie from then on: a container's first process may not wait for orphans."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_nodes_without_ssh_meet_when_each_is_started_alone(folder):
    (folder / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    options = ["-H", "hosts", "--no_ssh", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    nodes = [start(folder, SHOW, *options, f"--node_rank={rank}") for rank in (0, 1)]
    ranks = [shown(finish(node)[0]) for node in nodes]
    assert [[r["RANK"] for r in node] for node in ranks] == [["0"], ["1"]] and ranks[0][0]["WORLD_SIZE"] == "2"


def test_slurm_allocation_is_seen_and_used(folder, monkeypatch):
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]", "GPUS_ON_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    (folder / ".deepspeed_env").write_text("FROM_FILE=1\n")
    options = ["--num_gpus=1", "--master_port", str(free_port())]
    ranks = shown(finish(start(folder, SHOW, *options, args=NASTY))[0])
    assert [(r["RANK"], r["WORLD_SIZE"], r["CUDA_VISIBLE_DEVICES"]) for r in ranks] == [
        ("0", "2", "0"),
        ("1", "2", "0"),
    ]
    assert all(r["argv"] == ["script.py", "--local_rank=0", *NASTY] and r["FROM_FILE"] == "1" for r in ranks)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert "srun has started megazero on several nodes" in finish(start(folder, SHOW), status=2)[1]
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "two")
    assert "error: SLURM_JOB_NUM_NODES=two is no number" in finish(start(folder, SHOW), status=2)[1]


@pytest.mark.parametrize(
    "variables, gpus",
    [
        ({"ON_NODE": "4", "PER_NODE": "8"}, 4),
        ({"PER_NODE": "8"}, 8),
        ({"PER_NODE": "a100:8"}, 8),
        ({"PER_NODE": "a100:4,3g.20gb:2"}, 6),
        ({"PER_NODE": "a100"}, 0),
        ({}, 0),
    ],
)
def test_gpus_of_slurms_nodes(variables, gpus):
    assert slurm_gpus({f"SLURM_GPUS_{name}": value for name, value in variables.items()}) == gpus


def test_slurm_nodes_with_an_unknown_number_of_gpus_do_not_run_as_if_they_had_none(folder, monkeypatch, capsys):
    """As under salloc, on a machine without a GPU."""
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(runner, "_count_gpus", lambda: 0)
    monkeypatch.setattr(os, "execvp", lambda _, command: started.append(command))
    started: list[list[str]] = []
    assert main([__file__]) == 2 and not started
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "Give --num_gpus, the number of ranks per node" in output, output
    for number, variable in enumerate(("", "a100:3")):
        monkeypatch.setenv("SLURM_GPUS_PER_NODE", variable)
        main([__file__] if variable else ["--num_gpus=3", __file__])
        assert "--nproc-per-node 3" in " ".join(started[number])


def test_slurms_step_has_all_gpus_of_a_job_that_was_allocated_by_the_task(folder, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, command: started.append(command))
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]", "GPUS_ON_NODE": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for per_task in ("", "1"):
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", per_task)
        main(["--include=127.0.0.1:0,1@127.0.0.2:0,1", "--launcher_args=--mem=0", __file__])
        # what the user adds comes last, and so may replace it
        assert ("--gpus-per-node 4 --mem=0 env " in " ".join(started.pop())) == bool(per_task)


def test_each_slurm_job_meets_at_a_port_of_its_own_unless_one_is_given(folder, monkeypatch):
    """Several jobs may share a node, and c10d joins a job to whatever store it finds at the port."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, command: started.append(command))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    for job, options in (("7", []), ("123456", []), ("7", ["--master_port", "6000"])):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        main(["--launcher=slurm", "--num_gpus=1", *options, __file__])
    endpoints = [command[command.index("--rdzv-endpoint") + 1] for command in started]
    assert endpoints == ["127.0.0.1:20007", "127.0.0.1:23456", "127.0.0.1:6000"]


def test_the_file_of_the_process_id_takes_the_place_of_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (mine := tmp_path / "mine").write_text("text")
    (file := tmp_path / f"{os.getpid()}.megazero").symlink_to(mine)
    with runner._pid_file():
        assert file.read_text() == str(os.getpid()) and mine.read_text() == "text"


def test_slurms_srun_leaves_no_file_of_a_process_id(folder, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main(["--launcher=slurm", "--save_pid", "--num_gpus=1", __file__]) == 2
    assert "--save_pid does not work under Slurm" in capsys.readouterr().err and not list(folder.glob("*.megazero"))


def test_a_store_that_ends_while_the_ranks_run_is_not_called_a_failure_to_meet(monkeypatch, capsys):
    def waiting(_):
        raise RendezvousConnectionError("Failed to recv, got 0 bytes.")

    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", waiting)
    where = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--no-python"]
    assert launch.run_ranks(launch.run.parse_args([*where, "--monitor-interval=0.1", "sleep", "20"])) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: this node has lost 127.0.0.1:") and "Failed to recv" in last


def test_waiting_for_a_meeting_point_names_it_without_cpp_frames(folder):
    with socket.socket() as other:  # something else answers there
        other.bind(("127.0.0.1", 0))
        other.listen()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        options = ["--no_ssh", "--num_nodes=2", "--node_rank=1", "--master_addr=127.0.0.1"]
        process = start(folder, SHOW, *options, f"--master_port={where.partition(':')[2]}")
        for _ in range(3):
            other.accept()[0].close()
        process.terminate()
        _, messages = process.communicate(timeout=200)
    assert f"the ranks meet at {where}" in messages and "frame #" not in messages, messages


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc-per-node", "x"], "x"),
        (["--nproc-per-node", "0"], "--nproc-per-node must be at least 1, got 0"),
        (["--nnodes", "two"], "'two'"),
        (["--nnodes", "1:2:3"], "nnodes=1:2:3"),
        (["--nnodes", "0"], ""),  # older torchruns do not say more
        (["--standalone", "--log-dir", "/proc/self/none"], "'/proc/self/none'"),
        (["--max-restarts", "-1"], ""),
        (["--monitor-interval", "-1"], ""),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "host:port"], "'host:port'"),
        (["--rdzv-backend", "pigeon"], "'pigeon'"),
    ],
)
def test_options_that_torchrun_does_not_understand_are_one_line(monkeypatch, options, said):
    monkeypatch.setattr(sys, "argv", ["launch", "--nproc-per-node", "1", *options, "x.py"])
    with pytest.raises(SystemExit, match=f"error: torchrun cannot start with these options: .*{said}") as ended:
        launch.main()
    assert "\n" not in str(ended.value)


LISTENING = """
import os
from pathlib import Path
of_torchrun = {os.readlink(file) for file in Path(f"/proc/{os.getppid()}/fd").iterdir()}
sockets = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
print([at.partition(":")[0] for _, at, _, state, *_, inode in (s[:10] for s in sockets)
       if state == "0A" and f"socket:[{inode}]" in of_torchrun])
"""


@pytest.mark.parametrize("options", [["--standalone"], ["--standalone", "--master-port=6000"], ["--master-port=0"]])
def test_no_other_host_reaches_the_store_of_the_ranks_of_one_node(folder, options):
    (folder / "script.py").write_text(LISTENING)
    command = [sys.executable, "-m", "megazero.launch", *options, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stdout == "['0100007F']\n" and "rdzv" not in done.stderr, done  # 127.0.0.1, and nothing else


def test_what_torchrun_unpickles_on_one_node_is_in_its_own_process():
    meeting = launch._OneNode(RendezvousParameters(launch._ONE_NODE, launch._HERE, "7", 1, 1))
    assert isinstance(meeting.next_rendezvous().store, HashStore)


def test_fault_of_torchrun_once_it_runs_is_not_called_one_of_the_options(monkeypatch):
    def fault(*_):
        raise ValueError("of the agent")

    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", fault)
    monkeypatch.setattr(sys, "argv", ["launch", "--standalone", "--no-python", "true"])
    with pytest.raises(ValueError, match="of the agent"):
        launch.main()


def test_a_job_on_one_node_has_the_id_that_it_is_given_or_one_of_its_own(monkeypatch):
    ids: list[str] = []
    monkeypatch.setattr(launch.run, "run", lambda args: ids.append(args.rdzv_id))
    for options in (["--rdzv-id=mine"], [], []):
        launch.run_ranks(launch.run.parse_args(["--standalone", *options, "x.py"]))
    assert ids[0] == "mine" and len(set(ids)) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--standalone"], ""),
        (["--standalone", "--rdzv-endpoint=node:7"], ""),
        (["--standalone", "--nnodes=2"], ""),
        (["--nnodes=2"], "the ranks meet at 127.0.0.1:29500\n"),
        (["--master-port=6000"], "the ranks meet at 127.0.0.1:6000\n"),
        (["--rdzv-endpoint=node:7"], "the ranks meet at node:7\n"),
    ],
)
def test_where_ranks_meet_is_said_where_it_was_told(monkeypatch, capsys, options, said):
    monkeypatch.setattr(launch.run, "run", lambda args: None)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert launch.run_ranks(launch.run.parse_args([*options, "x.py"])) == 0
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("options", "host"),
    [
        (["--nnodes=2", "--master-addr=nodex"], "nodex"),
        (["--rdzv-endpoint=nodex"], "nodex"),
        (["--rdzv-endpoint=[fd00::zz]:7"], "fd00::zz"),
    ],
)
def test_name_that_this_host_does_not_know_is_said_before_the_wait(monkeypatch, capsys, options, host):
    def unknown(asked, _):
        raise socket.gaierror(socket.EAI_NONAME, f"nobody is {asked}")

    monkeypatch.setattr(launch.run, "run", lambda args: None)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert launch.run_ranks(launch.run.parse_args([*options, "x.py"])) == 0
    said = f"warning: this host does not know the name {host} (nobody is {host}), and waits until it does. "
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("nodes", "ranks", "is_said"), [(2, [], True), (2, [17], False), (1, [], False)])
def test_a_node_that_waits_for_others_says_so(monkeypatch, capsys, nodes, ranks, is_said):
    monkeypatch.setattr(launch, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(launch, "children", lambda _: ranks)
    monkeypatch.setattr(launch.run, "run", lambda _: time.sleep(1))
    assert launch.run_ranks(launch.run.parse_args([f"--nnodes={nodes}", "--master-port=6000", "x.py"])) == 0
    said = f"this node has waited 0.1 s for the others of {nodes} nodes at 127.0.0.1:6000. "
    assert (said in capsys.readouterr().err) == is_said


def test_port_that_is_taken_is_one_clear_line(folder):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _, messages = finish(start(folder, SHOW, "--master_port", port), status=1)
    assert f"error: the nodes cannot meet at 127.0.0.1:{port}: " in messages and "Traceback" not in messages


@pytest.mark.parametrize(
    ("conf", "said"),
    [("is_host=0,read_timeout=1", "127.0.0.1, {port}"), ("join_timeout=1", "RendezvousTimeoutError")],
)
def test_nodes_that_do_not_meet_over_c10d_are_one_clear_line(monkeypatch, capsys, conf, said):
    port = free_port()
    where = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
    assert launch.run_ranks(launch.run.parse_args([*where, "x.py"])) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: the nodes cannot meet at 127.0.0.1:{port}: ") and said.format(port=port) in last

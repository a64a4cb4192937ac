"""Every launch script runs on this machine, from raw text to generated text, at a tiny size."""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pretrain_gpt2
from tests.ranks import free_port, run_script
from tests.tiny import make_corpus

ROOT = Path(__file__).parent.parent
TINY = {
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32",
    "NUM_HEADS": "4",
    "SEQ_LENGTH": "32",
    "BATCH_SIZE": "2",
    "TRAIN_ITERS": "4",
    "SAMPLE_MB": "0.2",
    "SAMPLE_VOCAB_SIZE": "512",
    "LOG_INTERVAL": "2",
    "EVAL_INTERVAL": "4",
    "EVAL_ITERS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHON": sys.executable,
}


def run(script: str, *arguments: str, **variables: str) -> str:
    """Runs a script with the tiny sizes and returns its output; it must exit with EXPECT (0). It runs in CWD (the repository)."""
    done = subprocess.run(
        ["bash", script, *arguments],
        cwd=variables.get("CWD", ROOT),
        env={**os.environ, **TINY, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == int(variables.get("EXPECT", 0)), done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict[str, str]:
    """The variables that name a tiny tokenized corpus and its vocabulary."""
    flags = make_corpus(tmp_path_factory.mktemp("scripts and a space"))
    return {"TRAIN_DATA": flags[1], "TOKENIZER_PATH": flags[3], "SPLIT": "8,1,1", "PRECISION": "--bf16"}


def test_main_job_from_nothing_to_text_and_on(tmp_path):
    """The README's first command: corpus, vocabulary, tokens, training, summary; then resume, generate, evaluate."""
    # What stands in CDPATH leads `cd` elsewhere, and has it print where.
    where = {"DATA_DIR": str(tmp_path / "my data"), "SAVE": str(tmp_path / "run"), "SPLIT": "8,1,1", "CDPATH": "."}
    output = run("scripts/pretrain_gpt2_zero2.sh", **where)
    for promised in (
        "stage 2: optimizer states and gradients are sharded over 2 data-parallel ranks",
        "memory after the first step",
        "training loss",
        "validation perplexity",
        "tokens/s",
        "model TFLOP/s",
        "peak memory per rank",
        "TensorBoard log",
        "loss plot",
        "checkpoint",
        "generate text",
    ):
        assert promised in output, output
    assert torch.cuda.is_available() or "MFU" not in output, "nobody knows the peak of a CPU"
    assert (tmp_path / "run" / "loss.png").stat().st_size > 5000
    output = run("scripts/pretrain_gpt2_zero3.sh", "--lr", "1e-4", **where, TRAIN_ITERS="6")
    assert "continuing after iteration 4" in output and "iteration        6/       6" in output
    assert "stage 3: all model states are sharded over 2 data-parallel ranks" in output

    text = "the list of all the names"
    greedy = {"LOAD": where["SAVE"], "TEMPERATURE": "0", "OUT_SEQ_LENGTH": "8"}
    output = run("scripts/generate_text.sh", "--prompt", text, **greedy, MODEL_PARALLEL_SIZE="2")
    flags = ["--load", where["SAVE"], "--prompt", text, "--temperature", "0", "--out-seq-length", "8"]
    alone = run_script(1, str(ROOT / "generate_samples.py"), flags).stdout.partition(text)[2]
    assert len(alone) > 8 and output.partition(text)[2] == alone, "greedy text does not depend on the ranks"
    sample = tmp_path / "sample.txt"
    sample.write_text("The value is the same on every rank . \n" * 20)
    flags = ["--load", where["SAVE"], "--valid-data", str(sample), "--task", "wikitext"]
    assert "adjusted perplexity" in (done := run_script(1, str(ROOT / "evaluate_gpt2.py"), flags).stdout), done


def test_precision_is_what_was_said_else_what_the_gpus_have(tmp_path):
    python = tmp_path / "python"  # of a machine with older GPUs
    stand_in(tmp_path, "python", f'#!/bin/sh\n[ "$1" = -c ] || exec {sys.executable} "$@"\necho fp16\n')
    file = "--deepspeed_config scripts/configs/ds_zero_stage_1.config"
    default = ""  # without a GPU
    if torch.cuda.is_available():
        default = "--bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "--fp16"
    for interpreter, precision, arguments, expected in (
        (sys.executable, "", "", default),
        (python, "", "", "--fp16"),
        (python, "", "--lr 1 --bf16", ""),
        (python, "", file, ""),
        (python, "bf16", file, "--bf16"),
        (python, "--bf16", "", "--bf16"),  # as it was once written
        (python, "fp32", "", ""),
    ):
        command = f"source scripts/common.sh; PYTHON={interpreter}; precision_flag {arguments}; echo [$PRECISION_FLAG]"
        variables = {**os.environ, "PRECISION": precision}
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
        assert done.stdout == f"[{expected}]\n", (precision, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        "--deepspeed_config FILE",
        "--deepspeed_config=FILE",
        "--deepspeed-config FILE --lr 1",
        "--deepspeed-config=FILE",
        "--deepscale_config FILE",
        "--deepscale-config=FILE",
        "--deepspeed_config /dev/null --deepspeed_config=FILE",
    ],
)
def test_keys_of_the_json_file_are_seen_whatever_the_flag_is_called(tmp_path, arguments):
    file = tmp_path / "a b.json"
    file.write_text('{"optimizer": {"type": "Adam"}}')
    arguments = arguments.replace("FILE", f"'{file}'")
    assert json_keys(arguments) == "optimizer\n"


def json_keys(arguments: str) -> str:
    """What the scripts find that the JSON of these arguments decides, or their error."""
    command = f'source scripts/common.sh; PYTHON={sys.executable}; read_json {arguments}; echo "$JSON_KEYS"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('{"optimizer":\n {"type": "AdamW"},\t"gradient_clipping":\t1.0}', "optimizer gradient_clipping"),
        ('{/* "optimizer": {}, */ "train_batch_size": 8 // "scheduler": {}\n}', "train_batch_size"),
        ('{"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "fp16": {"enabled": false}}', "fp16"),
        ('{"zero_optimization": {"optimizer": 1}}', "zero_optimization"),
    ],
)
def test_scripts_read_a_json_as_the_job_does_from_a_file_and_from_base64(tmp_path, text, keys):
    (tmp_path / "a.json").write_text(text)
    for source in (tmp_path / "a.json", base64.urlsafe_b64encode(text.encode()).decode()):
        assert json_keys(f"--deepspeed_config {source}") == f"{keys}\n"


def test_scripts_end_with_one_line_on_a_json_that_cannot_be_read(corpus):
    output = run("scripts/pretrain_gpt2.sh", "--deepspeed_config", "nowhere", **corpus, EXPECT="1")
    assert output == "error: The configuration 'nowhere' is neither an existing file nor base64 of JSON.\n"


def test_scripts_keep_their_line_ends_in_a_clone_for_windows():
    patterns = [line.split()[0] for line in (ROOT / ".gitattributes").read_text().splitlines() if "eol=lf" in line]
    scripts = [path for path in (*ROOT.glob("*"), *ROOT.glob(".ci/*"), *ROOT.glob("*/*.s*")) if is_script(path)]
    assert len(scripts) > 10
    for path in scripts:
        assert any(path.match(pattern.removeprefix("/")) for pattern in patterns), path


def is_script(path):
    return path.is_file() and path.read_bytes()[:2] == b"#!"


def test_two_nodes_meet_by_node_rank_and_train_by_other_flags_than_the_scripts(corpus, tmp_path):
    script, *flags = "scripts/pretrain_gpt2_distributed.sh", "--recompute", "none", "--no-bf16"
    shared = {
        **corpus,
        "PRECISION": "",
        "NNODES": "2",
        "MASTER_PORT": str(free_port()),
        "NPROC": "1",
        "SAVE": str(tmp_path),
    }
    second = subprocess.Popen(
        ["bash", script, *flags],
        cwd=ROOT,
        env={**os.environ, **TINY, **shared, "NODE_RANK": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        output = run(script, *flags, **shared, NODE_RANK="0")
        assert "2 = 1 tensor-parallel x 2 data-parallel" in output
        assert "recompute='none'" in output and "parameters in float32" in output
        assert second.wait(timeout=60) == 0
    finally:
        second.kill()


@pytest.mark.parametrize(
    "script, ranks, stage",
    [
        (
            "ds_zero2_pretrain_gpt2_model_parallel.sh",
            "2 = 2 tensor-parallel x 1",
            "stage 2: optimizer states and gradients are",
        ),
        ("pretrain_gpt2_zero_infinity.sh", "2 = 1 tensor-parallel x 2", "parameters rest in /"),
    ],
    ids=["model-parallel stage 2", "infinity"],
)
def test_by_a_json_file_or_with_offloaded_states_and_by_rendezvous(corpus, tmp_path, script, ranks, stage):
    variables = {"NUM_LAYERS": "1", "TRAIN_ITERS": "2", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    output = run(f"scripts/{script}", **corpus, **variables, SAVE=str(tmp_path))
    assert f"{ranks} data-parallel" in output and stage in output and "saved" in output


@pytest.mark.parametrize(
    "script, variables, ranks, tensor_parallel, zero",
    [
        ("pretrain_gpt2_distributed.sh", {}, 2, 1, {"stage": 0}),
        ("pretrain_gpt2_model_parallel.sh", {}, 2, 2, {"stage": 0}),
        ("pretrain_gpt2_zero1.sh", {"NPROC": "4", "MODEL_PARALLEL_SIZE": "2"}, 4, 2, {"stage": 1}),
        ("ds_pretrain_gpt2.sh", {}, 2, 1, {"stage": 1}),
        ("ds_zero-offload_pretrain_gpt2_model_parallel.sh", {}, 2, 2, {"stage": 2, "offload_optimizer": "cpu"}),
        (
            "pretrain_gpt2_zero3_offload.sh",
            {},
            2,
            1,
            {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        ),
        (
            "ds_pretrain_gpt2.sh",
            {"DS_CONFIG": "scripts/configs/ds_zero_stage_3.config", "NPROC": "1"},
            1,
            1,
            {"stage": 3},
        ),
        (
            "ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh",
            {"NPROC": "1"},
            1,
            1,
            {"stage": 2, "offload_optimizer": "cpu"},
        ),
        (
            "ds_pretrain_gpt2.sh",
            {"DS_CONFIG": "scripts/configs/ds_zero_offload.config", "NPROC": "3"},
            3,
            1,
            {"stage": 2, "offload_optimizer": "cpu"},
        ),
        (
            "ds_pretrain_gpt2.sh",
            {"DS_CONFIG": "scripts/configs/ds_zero_infinity.config", "FLAGS": "--nvme-path /tmp"},
            2,
            1,
            {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/tmp"},
        ),
    ],
    ids=[
        "distributed",
        "MP",
        "stage 1, MP",
        "stage 1",
        "offload",
        "offload 3",
        "stage 3 on one rank",
        "offload 10B",
        "offload by file",
        "infinity by file",
    ],
)
def test_ranks_are_started_with_what_the_script_stands_for(
    corpus, tmp_path, monkeypatch, script, variables, ranks, tensor_parallel, zero
):
    """Flags and files are checked by the job itself, here; instead of starting the ranks, the script prints the command."""
    flags = variables.get("FLAGS", "").split()
    variables = {**corpus, **variables, "SAVE": str(tmp_path), "PYTHON": starts_nothing(tmp_path)}
    command = run(f"scripts/{script}", *flags, **variables).splitlines()
    assert command[command.index("--nproc-per-node") + 1] == str(ranks)
    script = next(i for i, word in enumerate(command) if word.endswith("pretrain_gpt2.py"))
    monkeypatch.setattr(sys, "argv", command[script:])
    config, _ = pretrain_gpt2.check(ranks)
    assert config.parallel.model_parallel_size == tensor_parallel
    assert {name: getattr(config.zero, name) for name in zero} == zero


def starts_nothing(folder: Path) -> str:
    """A Python that checks no flags, which takes seconds, and instead of starting ranks says by which command."""
    checks = '[ -n "$MEGAZERO_CHECK" ] && { echo ${NPROC:-2} >&3; exit; }'
    says = '[ "$2" = megazero.runner.agent ] && { printf "%s\\n" "$@"; exit; }'
    stand_in(folder, "python", f'#!/bin/sh\n{checks}\n{says}\nexec {sys.executable} "$@"\n')
    return str(folder / "python")


def test_slurm_script_with_stand_ins_for_slurms_commands(corpus, tmp_path):
    stand_in(tmp_path, "scontrol", "#!/bin/sh\necho 127.0.0.1; echo other\n")
    stand_in(
        tmp_path,
        "srun",
        '#!/usr/bin/env bash\necho "$@"; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"\n',
    )
    slurm = {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_GPUS_PER_TASK": "1",  # of a job that was to have a task per GPU
        "SLURM_GPUS_ON_NODE": "3",
    }
    slurm |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": starts_nothing(tmp_path), "MASTER_PORT": "6000"}
    output = run("scripts/pretrain_gpt2.sbatch", **corpus, **slurm, NPROC="3", SAVE=str(tmp_path / "run"))
    srun, *command = output.splitlines()
    # not those of sbatch: more torchruns than may meet, without the variables that say where, and each with one GPU
    whole = "--ntasks=2 --ntasks-per-node=1 --export=ALL --gpus-per-node=3 "
    assert srun.startswith(f"{whole}--kill-on-bad-exit=1 --cpu-bind=none bash ")
    meet = (
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:6000 --rdzv-id 7 --max-restarts 0 --nproc-per-node 3 "
    )
    assert f"megazero.launch {meet}{ROOT}/pretrain_gpt2.py " in " ".join(command)


def test_slurm_script_submitted_elsewhere_ends_a_wrong_command_line_before_it_starts_a_node(corpus, tmp_path):
    job = f"   Command={ROOT}/scripts/pretrain_gpt2.sbatch --no-such-flag\n   WorkDir={tmp_path}"
    stand_in(tmp_path, "scontrol", f'#!/bin/sh\n[ "$1 $3" = "show 7" ] && echo "{job}" || echo n1 "$@"\n')
    stand_in(tmp_path, "srun", "#!/bin/sh\necho runs\n")
    slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "CWD": str(tmp_path)}
    slurm |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "MAX_RESTARTS": "3"}
    script = str(ROOT / "scripts/pretrain_gpt2.sbatch")
    output = run(script, "--no-such-flag", **corpus, **slurm, EXPECT="1")
    assert output == "error: Unknown flag --no-such-flag. --help lists all flags.\n"
    output = run(
        script, **corpus, **slurm, NPROC="1", MODEL_PARALLEL_SIZE="3", NUM_HEADS="3", HIDDEN_SIZE="96", EXPECT="1"
    )
    assert output.startswith("error: --model-parallel-size 3 does not divide the world of 2 ranks"), output
    stand_in(tmp_path, "scontrol", "#!/bin/sh\necho n1\n")
    output = run(script, **corpus, **slurm, EXPECT="2")
    assert output.startswith(f"error: neither {tmp_path}/scripts nor the folder of ") and output.count("\n") == 1


def test_slurm_script_queues_a_failed_job_again_as_often_as_it_may(tmp_path):
    for name, body in (
        ("scontrol", '[ "$1" = requeue ] && echo "again $2" || echo n1'),
        ("srun", 'echo "run $4 ${MAX_RESTARTS:-none} $TORCH_ELASTIC_SHUTDOWN_TIMEOUT $RDZV_ENDPOINT"; exit 3'),
    ):
        stand_in(tmp_path, name, f"#!/usr/bin/env bash\n{body}\n")
    slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}  # the port is that job's
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/pretrain_gpt2_distributed.sh").touch()
    slurm["SLURM_SUBMIT_DIR"] = str(tmp_path)
    slurm["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    run_once = "run --kill-on-bad-exit=1 none 110 n1:20007\n"  # and nothing of GPUs before that option
    for restarts, said in (
        ({}, ""),
        ({"MAX_RESTARTS": "2", "SLURM_RESTART_COUNT": "1"}, "again 7\n"),
        ({"MAX_RESTARTS": "2", "SLURM_RESTART_COUNT": "2"}, ""),
    ):
        assert run("scripts/pretrain_gpt2.sbatch", **slurm, **restarts, EXPECT="3") == f"{run_once}{said}"


def test_slurm_script_refuses_restarts_that_are_no_number_before_it_runs_anything(tmp_path):
    stand_in(tmp_path, "scontrol", "#!/usr/bin/env bash\necho n1\n")
    slurm = {"SLURM_JOB_NODELIST": "n1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = run("scripts/pretrain_gpt2.sbatch", **slurm, MAX_RESTARTS="x", EXPECT="2")
    assert output == "error: MAX_RESTARTS=x must be a number, or unset.\n"


def test_scripts_run_by_links_to_them(corpus, tmp_path):
    for name in ("pretrain_gpt2.sh", "pretrain_gpt2_zero2.sh"):
        (tmp_path / name[:-3]).symlink_to(ROOT / "scripts" / name)
        output = run(str(tmp_path / name[:-3]), **corpus, NNODES="x", EXPECT="2")
        assert output == "error: NNODES=x must be a number, or unset.\n"


def test_relative_paths_count_from_the_folder_in_which_a_script_was_started(corpus, tmp_path):
    (tmp_path / "a.json").write_text('{"steps_per_print": 1, "train_micro_batch_size_per_gpu": 2}')
    (tmp_path / "web").mkdir()
    for suffix in (".idx", ".bin"):
        (tmp_path / f"web/news_items_text_document{suffix}").symlink_to(corpus["TRAIN_DATA"] + suffix)
    (tmp_path / "tokenizers").mkdir()  # no package
    if sys.version_info >= (3, 11):
        (tmp_path / "random.py").write_text("raise SystemExit('not the module of Python')")
    variables = {
        **corpus,
        "TRAIN_DATA": "web/news_items_text_document",
        "DS_CONFIG": "a.json",
        "NPROC": "1",
        "TRAIN_ITERS": "1",
        "PYTHONPATH": "",
    }
    output = run(str(ROOT / "scripts/ds_pretrain_gpt2.sh"), **variables, CWD=str(tmp_path))
    assert "saved" in output and (tmp_path / "checkpoints/gpt2_web_news_items_2x32/loss.png").exists()


def test_a_space_parts_corpora_unless_it_is_in_the_path_of_one(tmp_path):
    (tmp_path / "my web_text_document.idx").touch()
    for given, count in (
        ("my web", 1),  # the ending may be left out (megazero/data/corpora.py)
        ("my web_text_document", 1),
        ("my web_text_document.idx", 1),
        ("0.3 web 0.7 other", 4),
    ):
        command = f'source {ROOT}/scripts/common.sh; corpora "{given}"; echo ${{#CORPORA[@]}}'
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert done.stdout == f"{count}\n", given


def test_restarts_of_one_node_alone_are_refused_on_several(corpus):
    output = run("scripts/pretrain_gpt2.sh", **corpus, NNODES="2", MAX_RESTARTS="3", EXPECT="2")
    assert output.startswith("error: MAX_RESTARTS=3 is for one node, and NNODES is 2.") and output.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "1:4"}, "NNODES=1:4 must be a number, or unset."),
        ({"NODE_RANK": "node1"}, "NODE_RANK=node1 must be a number, or unset."),
        ({"MAX_RESTARTS": "x"}, "MAX_RESTARTS=x must be a number, or unset."),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2 must be below NNODES=2: nodes are numbered from 0."),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 must be below NNODES=1: nodes are numbered from 0."),
        ({"NNODES": "0"}, "NODE_RANK=0 must be below NNODES=0: nodes are numbered from 0."),
        (
            {"RDZV_ENDPOINT": "node0:6000"},
            "RDZV_ENDPOINT=node0:6000 needs NNODES, the number of nodes that meet there (1 for this one alone).",
        ),
    ],
)
def test_wrong_numbers_of_nodes_are_one_line(corpus, tmp_path, variables, said):
    """bash would take NNODES=1:4 for one node, and each node would train by itself."""
    output = run("scripts/pretrain_gpt2.sh", **corpus, **variables, SAVE=str(tmp_path), EXPECT="2")
    assert output == f"error: {said}\n"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1"}, "Set NNODES=$WORLD_SIZE NODE_RANK=$RANK; or NNODES=1, if"),
        ({"WORLD_SIZE": "16", "PET_NNODES": "2"}, "PET_NNODES=2 in the environment"),
        ({"PET_NNODES": "1:2"}, "Start the script by `python -m megazero.launch`"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"WORLD_SIZE": "8", "PET_NNODES": "1"}, None),
        ({"WORLD_SIZE": "2", "NNODES": "1"}, None),
    ],
)
def test_a_pod_of_several_does_not_train_by_itself(corpus, tmp_path, variables, said):
    expected = {"EXPECT": "0" if said is None else "1"}
    output = run("scripts/pretrain_gpt2.sh", **corpus, **variables, SAVE=str(tmp_path), CHECK_ONLY="1", **expected)
    assert said is None or (output.startswith("error: ") and said in output and output.count("\n") == 1), output


def test_flags_are_checked_before_any_rank_starts(corpus, tmp_path):
    output = run("scripts/pretrain_gpt2_zero2.sh", "--no-such-flag", **corpus, SAVE=str(tmp_path), EXPECT="1")
    assert output == "error: Unknown flag --no-such-flag. --help lists all flags.\n"
    output = run("scripts/pretrain_gpt2.sh", **corpus, NPROC="3", MODEL_PARALLEL_SIZE="2", EXPECT="1")
    assert output.startswith("error: --model-parallel-size 2 does not divide the world of 3 ranks")
    assert output.count("\n") == 1
    assert run("scripts/generate_text.sh", "--help", NPROC="2").count("usage: generate_samples.py") == 1
    output = run("scripts/generate_text.sh", LOAD=str(tmp_path), MODEL_PARALLEL_SIZE="3", EXPECT="1")
    assert "No checkpoint" in output, (
        "for as many ranks as the script wants, not for those that this machine is good for"
    )


def test_a_script_without_standard_output_checks_and_starts_its_job(corpus, tmp_path):
    job = "exec bash scripts/pretrain_gpt2_zero2.sh >&-"
    done = subprocess.run(
        ["bash", "-c", job],
        cwd=ROOT,
        env={**os.environ, **TINY, **corpus, "SAVE": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "latest").read_text() == "global_step4"


def test_a_check_says_nothing_if_the_script_that_asked_has_been_ended():
    end, descriptor = os.pipe()
    os.close(end)
    check = "from megazero.entry import run_script; run_script(lambda ranks: None, None)"
    asked = {**os.environ, "MEGAZERO_CHECK": str(descriptor)}
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, env=asked, pass_fds=[descriptor], capture_output=True
    )
    os.close(descriptor)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_taken_port_is_one_clear_line(corpus, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {**corpus, "MASTER_PORT": port, "SAVE": str(tmp_path), "PYTHON": starts_nothing(tmp_path)}
        output = run("scripts/pretrain_gpt2_distributed.sh", **variables, EXPECT="1")
    assert f"error: MASTER_PORT={port} cannot be used on this host" in output and "Traceback" not in output
    for port in ("29x", "0"):
        command = f"source scripts/common.sh; PYTHON={sys.executable}; check_port {port}"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith(f"error: MASTER_PORT={port} cannot be used"), done.stderr


def test_interpreter_without_the_packages_is_named():
    output = run("scripts/pretrain_gpt2.sh", PYTHON="/usr/bin/env", EXPECT="2")
    assert "error: PYTHON=/usr/bin/env is older than 3.10, or lacks" in output
    output = run("scripts/pretrain_gpt2.sh", PYTHON="README.md", EXPECT="2")
    assert output.startswith("error: PYTHON=README.md is no command that can be run in ") and output.count("\n") == 1


PYTHON3 = """#!{python}
import pathlib, subprocess, sys
if sys.argv[1:3] != ["-m", "venv"]:
    sys.exit(subprocess.run([{python!r}, *{flags}, *sys.argv[1:]], close_fds=False).returncode)
subprocess.run([{python!r}, "-m", "venv", "--without-pip", *sys.argv[3:]], check=True)
pip = next(pathlib.Path(sys.argv[-1]).glob("lib/*/site-packages")) / "pip"
pip.mkdir()
(pip / "__init__.py").touch()
(pip / "__main__.py").write_text("import sys; print('pip', *sys.argv[1:])")
"""


@pytest.mark.parametrize("has_torch", [True, False])
def test_a_new_environment_uses_the_pytorch_of_python3_and_installs_one_only_if_there_is_none(tmp_path, has_torch):
    """Without network: a stand-in for pip says what it was asked for."""
    stand_in(tmp_path, "python3", PYTHON3.format(python=sys.executable, flags=[] if has_torch else ["-S"]))
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    make = f"source {ROOT}/scripts/common.sh; cd {tmp_path}; make_venv data"
    look = ".venv/bin/python -c 'import importlib.util as u; print(u.find_spec(\"torch\").origin)' || true"
    for _ in ("there is no .venv", "it is there already, without the packages"):
        done = subprocess.run(["bash", "-c", f"{make}; {look}"], env=variables, stdout=subprocess.PIPE, text=True)
        pin = "" if has_torch else "-c constraints.txt "
        assert f"pip install --quiet --disable-pip-version-check {pin}-e .[data]\n" in done.stdout, done.stdout
        assert (torch.__file__ in done.stdout) == has_torch, done.stdout


def stand_in(folder: Path, name: str, text: str) -> None:
    """Makes the command `name` in `folder`."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def install(folder: Path, module: str) -> subprocess.Popen:
    """A script that needs `module`, in a copy of the repository in `folder` in which python3 is a stand-in."""
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts" / "common.sh").write_bytes((ROOT / "scripts" / "common.sh").read_bytes())
    command = f"source {folder}/scripts/common.sh; unset PYTHON; use_python data {module}; echo has $PYTHON"
    variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", "-c", command], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_an_environment_that_cannot_be_made_leaves_nothing_that_blocks_the_next_run(tmp_path):
    python3 = PYTHON3.format(python=sys.executable, flags=["-S"])
    stand_in(tmp_path, "python3", python3 + "sys.exit('ensurepip is not available')\n")  # Debian without python3-venv
    output = install(tmp_path, "nothing").communicate()[0]
    assert "ensurepip is not available\nerror: python3 cannot make .venv" in output
    stand_in(tmp_path, "python3", python3)
    assert "pip install" in install(tmp_path, "nothing").communicate()[0]
    shutil.rmtree(next(tmp_path.glob(".venv/lib/*/site-packages/pip")))
    assert f"error: {tmp_path}/.venv has no pip" in install(tmp_path, "nothing").communicate()[0]


def test_a_machine_without_a_python_is_told_so_in_one_line(tmp_path):
    stand_in(tmp_path, "python3", "#!/bin/sh\nexit 127\n")
    output = install(tmp_path, "nothing").communicate()[0]
    assert output == "error: python3 is missing or older than 3.10. Install a newer one, or name one by PYTHON.\n"


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path):
    stand_in(tmp_path, "python3", PYTHON3.format(python=sys.executable, flags=["-S"]))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, target in (("python", "python3"), ("python3", "/removed/python3.9")):  # as by an upgrade of the system
        (tmp_path / ".venv/bin" / name).symlink_to(target)
    output = install(tmp_path, "nothing").communicate()[0]
    assert "pip install" in output, output


def test_packages_that_cannot_be_installed_in_a_read_only_repository_are_named_with_a_way_out(tmp_path):
    (tmp_path / "constraints.txt").mkdir()  # nothing can be written there, even by root
    output = install(tmp_path, "nothing").communicate()[0]
    assert output.endswith("Name one that has them by PYTHON.\n") and not (tmp_path / ".venv").exists()


def test_of_two_first_runs_one_installs_and_the_other_waits_for_it(tmp_path):
    slow = "import sys, time, pathlib; print('pip'); time.sleep(1); (pathlib.Path(sys.path[-1]) / 'needed.py').touch()"
    python3 = PYTHON3.format(python=sys.executable, flags=["-S"])
    stand_in(tmp_path, "python3", python3 + f'(pip / "__main__.py").write_text({slow!r})\n')
    outputs = [process.communicate()[0] for process in [install(tmp_path, "needed") for _ in range(2)]]
    assert all(output.endswith(f"has {tmp_path}/.venv/bin/python\n") for output in outputs), outputs
    assert "".join(outputs).count("pip\n") == 1, outputs


def test_tests_find_modules_where_users_do(tmp_path):
    body = f'[ "$2" = pytest ] && {{ echo "safe path: ${{PYTHONSAFEPATH:-no}}"; exit; }}\nexec {sys.executable} "$@"\n'
    stand_in(tmp_path, "python", f"#!/bin/sh\n{body}")
    assert run("scripts/test.sh", "-x", PYTHON=str(tmp_path / "python")) == "safe path: no\n"


def test_without_arguments_no_test_is_left_out_for_a_package_that_can_be_installed():
    sources = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    needed = set(re.findall(r'importorskip\("(\w+)', sources)) - {"apex", "deepspeed", "peft", "wandb"}  # in no extra
    asked = "".join((ROOT / "scripts" / name).read_text() for name in ("common.sh", "test.sh"))
    assert needed <= set(re.findall(r"\w+", asked))

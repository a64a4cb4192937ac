"""What the job sets of torch's back ends, and what it says of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero import comm, job, mpu, throughput
from megazero.arguments import load_config
from megazero.backends import say_what_is_idle, set_up_backends
from megazero.throughput import peak_tflops
from tests.tiny import ROOT

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def settings_of_this_process(monkeypatch) -> Iterator[None]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("CU", "NCCL_"))}
    monkeypatch.setattr(os, "environ", variables)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize("before", ["highest", "high"])
def test_fp32_products_are_whole_unless_tf32_is_asked_for(before):
    torch.set_float32_matmul_precision(before)  # "high" is that of torch in NVIDIA's container images
    set_up_backends(load_config([]))
    assert torch.get_float32_matmul_precision() == "highest"
    set_up_backends(load_config(["--tf32"]))
    assert torch.get_float32_matmul_precision() == "high"
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)  # on a CPU all the same
    assert "TF32" not in peak_tflops(CPU, torch.float32)[1]


def test_a_first_product_that_loads_libraries_does_not_count(monkeypatch):
    product, clock, seconds = torch.Tensor.__matmul__, [0.0], iter([2.0])

    def slow_at_first(a, b):
        clock[0] += next(seconds, 0.01)
        return product(a, b)

    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.Tensor, "__matmul__", slow_at_first)
    assert peak_tflops(CPU, torch.float32)[0] == pytest.approx(2 * 512**3 / 0.01 / 1e12)


@pytest.mark.parametrize("slowdown", [1.5, 12.0])
def test_a_cpu_that_is_far_slower_in_16_bits_is_told(slowdown, monkeypatch, caplog):
    product, clock = torch.Tensor.__matmul__, [0.0]

    def slow_in_16_bits(a, b):
        clock[0] += 0.001 * (slowdown if a.dtype == torch.bfloat16 else 1.0)
        return product(a, b)

    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.Tensor, "__matmul__", slow_in_16_bits)
    job.warn_if_slow(CPU, torch.bfloat16)
    job.warn_if_slow(CPU, torch.float32)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (slowdown > 3.0)
    assert not told or "product in bfloat16 takes 12 times as long as in fp32" in told[0], told


# A process that holds 600 MiB starts another one, which says the most that it has held.
PEAK = "import torch; from megazero.throughput import peak_memory_bytes; print(peak_memory_bytes(torch.device('cpu')))"
STARTS_ANOTHER = """
import subprocess, sys
held = b"x" * int(sys.argv[1])
print(subprocess.run([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE, text=True, check=True).stdout)
"""


def test_the_peak_of_a_process_is_not_that_of_the_one_that_has_started_it():
    def peak(*command):
        done = subprocess.run([sys.executable, "-c", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return int(done.stdout)

    alone = peak(PEAK)  # torch: 250 MB, or 700 if it is built for CUDA
    assert alone > 50 << 20
    assert peak(STARTS_ANOTHER, str(alone + (300 << 20)), PEAK) < alone + (200 << 20)


@pytest.mark.parametrize("noted", [0, 1 << 40])
def test_a_peak_that_the_kernel_notes_late_or_not_at_all_is_what_is_held_at_least(monkeypatch, tmp_path, noted):
    (tmp_path / "status").write_text("Name:\tpython\n")
    monkeypatch.setattr(
        throughput, "Path", lambda path: tmp_path / "status" if path.endswith("/status") else Path(path)
    )
    monkeypatch.setattr(throughput.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=noted // 1024))
    peak = throughput.peak_memory_bytes(CPU)
    assert peak == noted if noted else peak > 50 << 20


@pytest.mark.parametrize(
    "name, known",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_a_known_gpu_is_found_by_its_name(monkeypatch, name, known):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    value, source = peak_tflops(torch.device("cuda"), torch.bfloat16)
    assert value == known and source.startswith("data sheet of ")


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"])
def test_a_gpu_whose_name_begins_as_a_known_one_is_measured(monkeypatch, name):
    def randn(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch, "randn", randn)
    with pytest.raises(ZeroDivisionError):
        peak_tflops(torch.device("cuda"), torch.bfloat16)


def test_what_a_peak_is_measured_with_is_no_memory_of_the_job(one_rank, monkeypatch):
    done = []
    monkeypatch.setattr(job, "peak_tflops", lambda *_: done.append("measured") or (1.0, "a test"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: done.append("forgotten"))
    monkeypatch.setattr(comm, "local_device", lambda: GPU)

    def model_provider(*_):
        done.append("model")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job.build_job(load_config([]), mpu.get_groups(), None, model_provider, None)
    assert done == ["measured", "forgotten", "model"]


@pytest.mark.parametrize(
    "flags, device, capability, said",
    [
        ("", GPU, (9, 0), "so does --tf32"),
        ("", GPU, (7, 0), ""),
        ("", CPU, None, ""),
        ("--bf16", GPU, (9, 0), ""),
        ("--tf32", GPU, (9, 0), ""),
        ("--tf32 --bf16", GPU, (9, 0), "--tf32 has no effect: parameters are in torch.bfloat16"),
        ("--tf32", CPU, None, "--tf32 has no effect: the ranks compute on cpu"),
    ],
)
def test_idle_tensor_cores_and_an_idle_flag_are_said_once(monkeypatch, caplog, flags, device, capability, said):
    caplog.set_level(logging.INFO, logger="megazero")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = load_config(flags.split())
    set_up_backends(config)
    say_what_is_idle(config.precision.dtype, config.precision.tf32, device)
    assert said in caplog.text and len(caplog.records) == bool(said), caplog.text


@pytest.mark.parametrize(
    "flags, is_set",
    [
        ("", False),
        ("--model-parallel-size 2", True),
        ("--model-parallel-size 2 --zero-stage 1", True),
        ("--model-parallel-size 2 --zero-stage 1 --overlap-param-gather", False),
        ("--model-parallel-size 2 --zero-stage 2", False),
        ("--model-parallel-size 2 --zero-stage 3", False),
        ("--zero-stage 1", False),
    ],
)
def test_one_hardware_queue_is_for_split_layers_without_sharded_gradients(flags, is_set):
    set_up_backends(load_config(flags.split()))
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == ("1" if is_set else None)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    set_up_backends(load_config(flags.split()))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "the user's own value"


def test_attention_with_a_mask_is_not_by_cudnn():
    set_up_backends(load_config([]))
    assert torch.backends.cuda.cudnn_sdp_enabled(), "the fastest without a mask, on Hopper"
    set_up_backends(load_config(["--reset-attention-mask"]))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_deterministic_mode_sets_what_must_be_there_before_cuda_starts(monkeypatch):
    config = load_config(["--deterministic-mode"])
    set_up_backends(load_config([]))
    assert not torch.are_deterministic_algorithms_enabled() and "NCCL_ALGO" not in os.environ
    set_up_backends(config)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="Tree")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_up_backends(config)
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":16:8", "Tree"), (
        "the user's own values"
    )
    for found in (":0:0", None):
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
        os.environ.update({} if found is None else {"CUBLAS_WORKSPACE_CONFIG": found})
        with pytest.raises(ValueError, match=f"it is {found or 'not set'}. Set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the"):
            set_up_backends(config)

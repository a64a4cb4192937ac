"""Process-wide settings of torch's backends for a job, made before CUDA starts because CUDA reads some of them at that point."""

from __future__ import annotations

import os

import torch

from megazero.config import Config
from megazero.logging import ALIKE, get_logger

logger = get_logger(__name__)


def set_up_backends(config: Config) -> None:
    """Applies the settings that `config` asks for; variables that are already set in the environment keep their values.

    Raises:
        ValueError: the environment contradicts --deterministic-mode, or CUDA has already started without the setting it needs.
    """
    # By default, kernels of several streams share 8 hardware queues of a GPU. With one queue they start in the order of their
    # launches. When layers are split, their all-reduce must start before the next matrix product fills the GPU, which one queue
    # ensures. At stages 2 and 3, it would also keep each unit's reduce-scatter and gathers, which are launched ahead, from
    # running alongside compute. The same holds for gathers of new weights (--overlap-param-gather).
    launches_ahead = config.zero.stage >= 2 or config.zero.overlap_param_gather
    if config.parallel.model_parallel_size > 1 and not launches_ahead:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    round_fp32_products(config.precision.tf32)
    if config.training.reset_attention_mask:
        leave_out_cudnn_attention()
    if config.training.deterministic_mode:
        _be_deterministic()


def round_fp32_products(tf32: bool) -> None:
    """Sets whether fp32 matrix products on a GPU round their operands to TF32.

    Overrides torch's initial setting either way: NVIDIA's container images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which makes
    torch round unasked.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def leave_out_cudnn_attention() -> None:
    """Has torch take another attention kernel than cuDNN's, which it prefers on Hopper and newer GPUs.

    With a mask, the gradients of cuDNN's kernel may be NaN (pytorch issue 196678: from torch 2.11 on, at 64 tokens more than a
    multiple of 128). And it compiles a graph for each number of keys, thus for each token that is generated.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _be_deterministic() -> None:
    name, right = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
    found = os.environ.get(name)
    if found not in right and (found is not None or torch.cuda.is_initialized()):
        raise ValueError(
            f"--deterministic-mode needs {name} to be {' or '.join(right)} before CUDA starts, and it is {found or 'not set'}. "
            f"Set {name}={right[0]} in the environment."
        )
    os.environ.setdefault(name, right[0])
    os.environ.setdefault("NCCL_ALGO", "Ring")  # otherwise NCCL chooses one per size and kind of collective
    torch.use_deterministic_algorithms(True)
    # Filling new tensors helps to find bugs, but costs a write of each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def say_what_is_idle(dtype: torch.dtype, tf32: bool, device: torch.device) -> None:
    """Logs that --tf32 has no effect on `device` or in 16 bits, or that fp32 without it leaves tensor cores idle."""
    is_cuda = device.type == "cuda"
    if tf32 and (dtype != torch.float32 or not is_cuda):
        why = f"the ranks compute on {device.type}" if dtype == torch.float32 else f"parameters are in {dtype}"
        logger.warning("--tf32 has no effect: %s", why, extra=ALIKE)
    elif is_cuda and _wastes_tensor_cores(device, dtype):
        logger.info(
            "matrix products in fp32 leave this GPU's tensor cores idle: --bf16 uses them, and so does --tf32, which keeps all "
            "in fp32 but rounds what is multiplied to 10 bits of mantissa",
            extra=ALIKE,
        )


def _wastes_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    is_whole_fp32 = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return is_whole_fp32 and torch.cuda.get_device_capability(device) >= (8, 0)

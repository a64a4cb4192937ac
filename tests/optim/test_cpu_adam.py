"""The CPU Adam: both kernels for mixed precision and the fused one, against plain torch, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from megazero.optim import adam_kernels, cpu_adam
from megazero.optim.adam_kernels import AdamSettings, Operands, mixed_kernel, one_pass, split, tiled
from megazero.optim.cpu_adam import CPUAdam, HybridAdam
from tests.bad_disks import largest_file
from tests.tiny import run_command

try:
    importlib.import_module("megazero.optim.adam_numba")
    HAS_NUMBA = True
except ImportError:
    HAS_NUMBA = False
KERNELS = [
    pytest.param(tiled, id="torch"),
    pytest.param(one_pass, id="numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")),
]
SIXTEEN = [torch.bfloat16, torch.float16]
SETTINGS = AdamSettings(
    lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, is_decoupled=True, corrects_bias=True
)


def torch_adam(parameters, **options):
    decoupled = options.pop("adamw_mode", True)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **{"weight_decay": 0.0, **options})


def random_parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer, steps=10, generator=None):
    generator = generator or torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]


def operands(numel, grad_dtype, out_dtype):
    generator = torch.Generator().manual_seed(numel)
    weights, grads, exp_avg = (torch.randn(numel, generator=generator) for _ in range(3))
    out = None if out_dtype is None else torch.empty(numel, dtype=out_dtype)
    return Operands(weights, grads.to(grad_dtype), exp_avg / 9, exp_avg.square() / 50, out)


def wanted(given, settings, step, scale):
    """torch's fused AdamW on fp32, then a cast: weights, first and second moment, 16-bit weights."""
    weights = nn.Parameter(given.weights.clone())
    weights.grad = given.grads.float().clone()
    optimizer = torch_adam(
        [weights],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        adamw_mode=settings.is_decoupled,
        fused=True,
    )
    moments = {"exp_avg": given.exp_avg.clone(), "exp_avg_sq": given.exp_avg_sq.clone()}
    optimizer.state[weights] = {"step": torch.tensor(float(step - 1)), **moments}
    if scale != 1.0:  # what GradScaler gives the fused kernels
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0 / scale), torch.tensor(0.0)
    optimizer.step()
    out = [] if given.out is None else [weights.detach().to(given.out.dtype)]
    return [weights.detach(), moments["exp_avg"], moments["exp_avg_sq"], *out]


def assert_same(got, want):
    """Equal bit for bit, unless torch's kernel rounds as numba's pass, which is not used then, cannot."""
    is_bitwise = not HAS_NUMBA or adam_kernels.fusion() is not None
    torch.testing.assert_close(got, want, **({"rtol": 0, "atol": 0} if is_bitwise else {}))


def results(given):
    return [given.weights, given.exp_avg, given.exp_avg_sq, *([] if given.out is None else [given.out])]


CHANGES = [{}, {"is_decoupled": False}, {"weight_decay": 0.0}, {"beta1": 0.3, "beta2": 0.5}, {"eps": 1e-3, "lr": 0.5}]
DTYPES = [(torch.float16, torch.float16), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
CASES = [(changes, torch.bfloat16, torch.bfloat16) for changes in CHANGES] + [({}, *pair) for pair in DTYPES]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("changes, grads, out", CASES)
def test_mixed_precision_is_torchs_fused_fp32_step_and_a_cast_bit_for_bit(kernel, changes, grads, out):
    settings = AdamSettings(**{**vars(SETTINGS), **changes})
    for numel, step, scale in ((64, 1, 1.0), (4096 + 77, 7, 1.0), (2**18 + 1, 1000, 0.37 / 1024), (5, 3, 0.37)):
        given = operands(numel, grads, out)
        expected = wanted(given, settings, step, scale)
        before = given.grads.clone()
        kernel(settings, given, float(step), scale)
        for got, want in zip(results(given), expected, strict=True):
            assert_same(got, want)
        assert torch.equal(given.grads, before)


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_the_kernel_for_fp32_alone_is_torchs_fused_step_bit_for_bit(scale):
    given = operands(4096 + 77, torch.float32, None)
    expected = wanted(given, SETTINGS, 7, scale)
    adam_kernels.unmixed(SETTINGS, given, 7.0, scale)
    for got, want in zip(results(given), expected, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_every_sixteen_bit_number_is_read_and_written_rightly(kernel, dtype):
    grads = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    # beta1 = 0 makes the first moment the gradient itself
    settings = AdamSettings(
        lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, is_decoupled=True, corrects_bias=False
    )
    given = Operands(grads.float(), grads, torch.zeros(2**16), torch.zeros(2**16), torch.empty(2**16, dtype=dtype))
    finite = grads.isfinite()
    kernel(settings, given, 1.0, 1.0)
    assert torch.equal(given.exp_avg[finite], grads.float()[finite])
    assert torch.equal(given.out[finite], grads[finite])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_weights_are_rounded_to_nearest_even_and_inf_and_nan_stay(kernel, dtype):
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()].float().sort().values
    ties = (numbers[1:].double() + numbers[:-1].double()) / 2  # exact in fp32, which has twice as many digits
    ends = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 65519.0, 65520.0, 3.389e38, 3.4e38, 1e-40, -1e-45])
    # Their bits overflow when rounded.
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    above = torch.nextafter(ties.float(), torch.tensor(math.inf))
    weights = torch.cat([ends, nans, ties.float(), above])  # the last few take another way
    zeros, numel = torch.zeros_like(weights), len(weights)
    given = Operands(weights, zeros.to(dtype), zeros.clone(), zeros.clone(), torch.empty(numel, dtype=dtype))
    settings = AdamSettings(**{**vars(SETTINGS), "lr": 0.0})
    want = weights.to(dtype)
    kernel(settings, given, 1.0, 1.0)
    torch.testing.assert_close(given.out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("offset", [0, 1, 31, 45])
@pytest.mark.parametrize("numel", [3 * 512, 3 * 512 + 20])
def test_weights_out_may_begin_anywhere_and_their_neighbours_stay(kernel, numel, offset):
    given, around = operands(numel, torch.bfloat16, None), torch.full((1700,), 7.0, dtype=torch.bfloat16)
    offset += -around.data_ptr() // 2 % 32  # from a line of the cache
    given = given._replace(out=around[offset : offset + numel])
    kernel(SETTINGS, given, 1.0, 1.0)
    assert torch.equal(given.out, given.weights.bfloat16())
    assert (around[:offset] == 7).all() and (around[offset + numel :] == 7).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_do_not_change_a_bit(kernel, monkeypatch):
    monkeypatch.setattr(adam_kernels, "THREAD_NUMEL", 64)
    one, many = (operands(10_000, torch.bfloat16, torch.bfloat16) for _ in range(2))
    kernel(SETTINGS, one, 3.0, 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    kernel(SETTINGS, many, 3.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(results(one), results(many), strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "is_decoupled"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.Adam, {}, False),
        (torch.optim.Adam, {"decoupled_weight_decay": True}, True),
        (torch.optim.AdamW, {"fused": False}, None),
        (torch.optim.AdamW, {"amsgrad": True}, None),
        (torch.optim.AdamW, {"maximize": True}, None),
    ],
)
def test_only_torchs_plain_fused_adam_is_stepped_by_these_kernels(kind, options, is_decoupled):
    optimizer = kind(random_parameters([3]), **{"fused": True, **options})
    settings = AdamSettings.of(optimizer, optimizer.param_groups[0])
    assert (settings and settings.is_decoupled) == is_decoupled


@pytest.mark.parametrize("numel, parts", [(0, 1), (64, 3), (640, 3), (1024, 4), (64 * 7, 16)])
def test_split_covers_everything_once_in_whole_blocks(numel, parts):
    bounds = split(numel, parts, 64)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(numel))
    assert len(bounds) <= parts and all(start % 64 == 0 for start, _ in bounds)


@pytest.mark.parametrize("missing", ["missing", "broken", ""])
def test_the_kernel_is_chosen_once_and_said(missing, monkeypatch, caplog, tmp_path):
    if missing:
        (tmp_path / "numba.py").write_text("raise OSError('a library cannot be loaded')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "numba", raising=False)
        if missing == "missing":
            monkeypatch.setitem(sys.modules, "numba", None)
        monkeypatch.delitem(sys.modules, "megazero.optim.adam_numba", raising=False)
        monkeypatch.delattr("megazero.optim.adam_numba", raising=False)
    elif not HAS_NUMBA or adam_kernels.fusion() is None:
        pytest.skip("there is no numba, or it does not round as this machine's torch")
    mixed_kernel.cache_clear()
    with caplog.at_level("INFO", logger="megazero"):
        assert mixed_kernel() is mixed_kernel() is (tiled if missing else one_pass)
    mixed_kernel.cache_clear()
    assert len(caplog.records) == 1 and ("by torch" if missing else "by numba") in caplog.text


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
@pytest.mark.parametrize("dtypes", [(torch.float16, None), (torch.float32, torch.float16)], ids=str)
def test_float16_is_torchs_on_a_processor_that_has_no_instruction_for_it(dtypes, monkeypatch):
    monkeypatch.setattr("megazero.optim.adam_numba.has_float16", lambda: False)
    monkeypatch.setattr(adam_kernels, "mixed_kernel", mixed_kernel.__wrapped__)
    monkeypatch.setattr(adam_kernels, "one_pass", None)
    given = operands(adam_kernels.NUMBA_NUMEL, *dtypes)
    expected = wanted(given, SETTINGS, 3, 0.37)
    adam_kernels.mixed(SETTINGS, given, 3.0, 0.37)
    assert all(map(torch.equal, results(given), expected))


def _double(array: np.ndarray) -> None:
    array *= 2


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
def test_machine_code_that_finds_no_room_on_the_disk_runs(tmp_path, monkeypatch):
    """As where the quota of the home directory is used up."""
    adam_numba = importlib.import_module("megazero.optim.adam_numba")
    monkeypatch.setattr(adam_numba.numba.config, "CACHE_DIR", str(tmp_path))
    double, array = adam_numba._compiled(_double), np.ones(3, np.float32)
    with largest_file(0):
        double(array)
    double(array)
    assert array.tolist() == [4.0, 4.0, 4.0]


# ---- processors for which torch's compiler fuses other sums


def passed(given, *fuses):
    """numba's pass on copies of fp32 `given`, for Adam with weight decay."""
    from megazero.optim.adam_numba import adam_pass

    settings = dataclasses.replace(SETTINGS, is_decoupled=False)
    copies = given._replace(**{name: getattr(given, name).clone() for name in ("weights", "exp_avg", "exp_avg_sq")})
    adam_pass(*map(adam_kernels._array, copies), *adam_kernels._coefficients(settings, 3.0, 1.0), *fuses)
    return copies


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
@pytest.mark.parametrize("fuses", [(None, True), (True, None), (None, None)], ids=str)
def test_a_fused_sum_is_rounded_once(fuses):
    given, (fuses_old, fuses_square) = operands(4096, torch.float32, None), fuses
    got = passed(given, *fuses)

    def rounded(x, is_rounded=True):
        return x.float().double() if is_rounded else x  # float64 holds a product of two float32 exactly

    w, g, _, v = (tensor.double() for tensor in given[:4])
    decay, beta2, rest2 = (float(np.float32(x)) for x in (SETTINGS.weight_decay, SETTINGS.beta2, 1 - SETTINGS.beta2))
    g = rounded(g + rounded(w * decay, fuses == (None, None)))
    old, square = rounded(v * beta2, not fuses_old), rounded(rounded(rest2 * g) * g, not fuses_square)
    assert torch.equal(got.exp_avg_sq, (old + square).float())


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
@pytest.mark.parametrize("kind", [(None, True), (True, None), (None, None), "another"], ids=str)
def test_the_pass_rounds_as_this_machines_torch_or_torch_computes(kind, monkeypatch, caplog):
    from megazero.optim.adam_numba import adam_pass

    def of_the_machine(settings, operands, step, scale):
        fuses = (None, True) if kind == "another" else kind
        coefficients = adam_kernels._coefficients(settings, step, scale)
        adam_pass(*map(adam_kernels._array, operands), *coefficients, *fuses)
        if kind == "another":
            operands.exp_avg_sq.mul_(1 + 1e-6)

    monkeypatch.setattr(adam_kernels, "unmixed", of_the_machine)
    chosen = mixed_kernel.__wrapped__, adam_kernels.fusion.__wrapped__
    monkeypatch.setattr(adam_kernels, "fusion", chosen[1])
    with caplog.at_level("INFO", logger="megazero"):
        assert chosen[0]() is (tiled if kind == "another" else one_pass)
    assert adam_kernels.fusion() == (None if kind == "another" else kind)
    assert ("rounds unlike numba's" in caplog.text) == (kind == "another")


@pytest.mark.skipif(
    not HAS_NUMBA or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no numba, or no AVX2"
)
def test_numbas_pass_rounds_as_torch_built_for_avx():
    assert adam_kernels.fusion() == (None, True)


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
def test_the_kernel_fuses_what_this_machines_torch_does(monkeypatch):
    got = operands(4096, torch.float32, None)
    monkeypatch.setattr(adam_kernels, "fusion", lambda: (None, None))
    want = passed(got, None, None)
    one_pass(dataclasses.replace(SETTINGS, is_decoupled=False), got, 3.0)
    assert all(map(torch.equal, results(got), results(want)))


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_how_this_machine_rounds_is_found_whatever_torchs_default_dtype(dtype):
    try:
        torch.set_default_dtype(dtype)
        assert adam_kernels.fusion.__wrapped__() == adam_kernels.fusion()
    finally:
        torch.set_default_dtype(torch.float32)


ON_ANOTHER_PROCESSOR = """
from tests.optim.test_cpu_adam import SETTINGS, adam_kernels, operands, results, torch, wanted

for numel in (4096, 1 << 16, 4096):  # the last one when numba is loaded
    given = operands(numel, torch.bfloat16, torch.bfloat16)
    expected = wanted(given, SETTINGS, 3, 0.37)
    adam_kernels.mixed(SETTINGS, given, 3.0, 0.37)
    assert all(map(torch.equal, results(given), expected)), numel
"""


def test_the_bits_are_torchs_on_a_processor_without_vector_instructions(monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    done = run_command([sys.executable, "-c", ON_ANOTHER_PROCESSOR])
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
@pytest.mark.parametrize("fails", [False, True])
def test_torchs_threads_do_not_wake_for_the_rest_after_the_last_block(fails, monkeypatch):
    """Else OpenMP's threads spin beside numba's in the next tile."""
    before, found, torchs = torch.get_num_threads(), [], adam_kernels.tiled

    def tiled(*given):
        found.append(torch.get_num_threads())
        torchs(*given)
        if fails:
            raise KeyboardInterrupt

    monkeypatch.setattr(adam_kernels, "tiled", tiled)
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            one_pass(SETTINGS, operands(10_000, torch.bfloat16, torch.bfloat16), 3.0, 1.0)
        assert found == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not HAS_NUMBA, reason="there is no numba")
def test_other_threads_run_during_an_update():
    """With this switch interval a thread runs only when another one gives the GIL away: torch's kernels do, so must numba's."""
    from megazero.optim.adam_numba import FUSIONS, adam_pass

    given = operands(1 << 22, torch.bfloat16, torch.bfloat16)
    flat = (given.weights, given.grads, given.exp_avg, given.exp_avg_sq, given.out)
    coefficients = *adam_kernels._coefficients(SETTINGS, 1.0, 1.0), *(adam_kernels.fusion() or FUSIONS[0])
    arguments = (*(adam_kernels._array(tensor) for tensor in flat), *coefficients)
    adam_pass(*arguments)  # compiles
    started, done, interval = threading.Event(), threading.Event(), sys.getswitchinterval()

    def work():
        started.set()
        for _ in range(20):
            adam_pass(*arguments)
        done.set()

    thread = threading.Thread(target=work)
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        started.wait()
        ran_during_work = not done.is_set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert ran_during_work


# ---- the optimizer


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
def test_fp32_parameters_step_as_torchs_fused_adam_bit_for_bit(cls, adamw_mode):
    shapes = [(22,), (64, 3), (1, 1000), ()]
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1, "adamw_mode": adamw_mode}
    got = train(cls(random_parameters(shapes), **options))
    want = train(torch_adam(random_parameters(shapes), fused=True, **options))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    want = train(torch_adam(random_parameters(shapes), foreach=False, **options))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # the for-loop rounds in another order


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("numel", [22, 127, 1024, 1_048_576 + 3])
def test_sixteen_bit_parameters_step_in_fp32_and_are_rounded_once(dtype, numel):
    optimizer, weights = CPUAdam(random_parameters([numel], dtype), lr=0.01), random_parameters([numel], dtype)[0]
    wide = nn.Parameter(weights.detach().float())
    plain = torch_adam([wide], lr=0.01, fused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        (got,) = train(optimizer, 1, generator)
        wide.data.copy_(weights.detach().float())
        wide.grad = optimizer.param_groups[0]["params"][0].grad.float()
        plain.step()
        weights.data.copy_(wide.data)
        assert_same(got, weights.detach())
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_states_of_sixteen_bits_step_as_torchs_fused_adamw(dtype):
    got = train(CPUAdam(random_parameters([(33, 3)], dtype), lr=0.01, fp32_optimizer_states=False))
    want = train(torch_adam(random_parameters([(33, 3)], dtype), lr=0.01, fused=True))
    assert torch.equal(got[0], want[0])


def test_sixteen_bit_parameters_come_in_pieces_that_keep_every_thread_busy(monkeypatch):
    found = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(cpu_adam, "mixed", lambda _, operands, __: found.append(operands.weights.numel()))
    parameter = nn.Parameter(torch.zeros(6 << 20, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    CPUAdam([parameter]).step()
    assert found == [4 << 20, 2 << 20]


def test_mixed_lists_and_groups_step_as_separate_optimizers():
    both = random_parameters([7]) + random_parameters([9], torch.bfloat16) + random_parameters([5], torch.float64)
    apart = copy.deepcopy(both)
    train(HybridAdam(both, lr=0.01), steps=1)
    for parameter, other in zip(both, apart, strict=True):
        other.grad = parameter.grad
        CPUAdam([{"params": [other], "lr": 0.01}]).step()
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_step_count_lies_where_it_is_read(is_loaded, dtype):
    """By torch's kernel on the device; for 16-bit parameters by the host, which would wait for the device in every tile."""
    saved = HybridAdam(random_parameters([5], dtype))
    train(saved, 1)
    parameter = nn.Parameter(torch.empty(5, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = HybridAdam([parameter])
    if is_loaded:
        optimizer.load_state_dict(saved.state_dict())
    optimizer.step()
    assert optimizer.state[parameter]["step"].device.type == ("meta" if dtype == torch.float32 else "cpu")


def test_no_bias_correction_takes_the_moments_as_they_are():
    for dtype in (torch.float32, torch.bfloat16):
        (parameter,) = random_parameters([70], dtype)
        before, parameter.grad = parameter.detach().double(), torch.ones_like(parameter)
        CPUAdam([parameter], lr=0.5, bias_correction=False, eps=0.0).step()
        want = before - 0.5 * 0.1 / math.sqrt(0.001)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(parameter.detach(), want.to(dtype), rtol=tolerance, atol=tolerance)


def test_parameters_and_gradients_need_not_be_contiguous():
    for dtype in (torch.float32, torch.bfloat16):
        weights = torch.randn(6, 4).to(dtype)
        strided, plain = nn.Parameter(weights.t()), nn.Parameter(weights.t().contiguous())
        gradient = torch.randn(4, 6).to(dtype)
        strided.grad, plain.grad = gradient.t().contiguous().t(), gradient
        CPUAdam([strided, plain], lr=0.1).step()
        assert torch.equal(strided, plain) and not strided.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_saved_state_is_restored_bit_for_bit(dtype):
    def make(parameters):
        groups = [{"params": parameters}, {"params": random_parameters([3], dtype)}]  # the latter without gradients
        return CPUAdam(groups, lr=0.01, adamw_mode=False, weight_decay=0.1)

    optimizer = make(random_parameters([40], dtype))
    train(optimizer, 2)
    (parameter,) = optimizer.param_groups[0]["params"]
    other = make([nn.Parameter(parameter.detach().clone())])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    want = train(optimizer, 2)
    assert torch.equal(train(other, 2)[0], want[0]) and torch.equal(train(copied, 2)[0], want[0])


@pytest.mark.parametrize("is_strided", [False, True])
def test_state_of_torchs_adamw_is_continued(is_strided):
    (weights,) = random_parameters([(7, 10)])
    if is_strided:  # as its moments are then; torch's fused kernel takes no gradient of another layout
        weights = nn.Parameter(weights.detach().t())
    plain = torch_adam([weights], lr=0.01, fused=not is_strided)
    train(plain, 2)
    ours = CPUAdam(copy.deepcopy(plain.param_groups[0]["params"]))
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    torch.testing.assert_close(train(ours, 2)[0], train(plain, 2)[0], **({} if is_strided else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("step", [4.0, 4, torch.tensor(4.0)])
def test_a_state_from_elsewhere_is_continued(step):
    (master,), (plain,) = random_parameters([64]), random_parameters([64])
    moments = {"exp_avg": torch.full((64,), 0.5), "exp_avg_sq": torch.full((64,), 2.0)}
    optimizer, reference = CPUAdam([master], lr=0.01), torch_adam([plain], lr=0.01, fused=True)
    optimizer.state[master] = {"step": step, **moments}
    reference.state[plain] = {"step": torch.tensor(4.0), **{key: value.clone() for key, value in moments.items()}}
    plain.grad, master.grad = torch.ones(64), torch.ones(64)
    reference.step()
    optimizer.step()
    assert torch.equal(master, plain) and float(optimizer.state[master]["step"]) == 5.0
    assert optimizer.state[master]["exp_avg"] is moments["exp_avg"]


# ---- what is refused


def test_amsgrad_and_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="CPUAdam has no AMSGrad"):
        CPUAdam(random_parameters([3]), amsgrad=True)
    with pytest.raises(ValueError, match="CPUAdam has no AMSGrad"):
        CPUAdam([{"params": random_parameters([3]), "amsgrad": True}])
    with pytest.raises(ValueError, match="got False in a group and True outside"):
        CPUAdam([{"params": random_parameters([3]), "fp32_optimizer_states": False}])
    for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"lr": math.nan}):
        with pytest.raises(ValueError, match="needs lr, eps and weight_decay"):
            CPUAdam(random_parameters([3]), **bad)


@pytest.mark.parametrize("setting", ["amsgrad", "maximize"])
def test_a_state_of_an_update_that_it_does_not_make_is_refused(setting):
    ours, theirs = random_parameters([3]), random_parameters([3])
    optimizer, other = CPUAdam(ours), torch.optim.AdamW(theirs, **{setting: True})
    train(other, 1)
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=f"CPUAdam has no AMSGrad and only minimizes, .*{setting}=True"):
        train(optimizer, 1)


def test_a_parameter_on_another_device_is_deepspeeds_error():
    parameter = nn.Parameter(torch.empty(4, device="meta"))
    parameter.grad = torch.empty(4, device="meta")
    optimizer = CPUAdam([parameter])
    with pytest.raises(AssertionError, match="updates what lies on the CPU, got a tensor on meta"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients"):
        CPUAdam(embedding.parameters()).step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_hybrid_lists_on_two_devices_step_as_adamw_on_each():
    def lists():
        return [
            nn.Parameter(p.detach().to(device)) for device in ("cpu", "cuda") for p in random_parameters([70, (3, 5)])
        ]

    got, want = HybridAdam(lists(), lr=0.01), torch_adam(lists(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        for a, b in zip(got.param_groups[0]["params"], want.param_groups[0]["params"], strict=True):
            a.grad = torch.randn(a.shape, generator=generator).to(a.device)
            b.grad = a.grad.clone()
        got.step()
        want.step()
    torch.testing.assert_close(got.param_groups[0]["params"], want.param_groups[0]["params"], rtol=1e-5, atol=1e-6)

"""Shared fixtures: this process is a world of one rank, so that single-process tests need no launcher."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The gate tries the same examples every time; `pytest --hypothesis-profile=new-examples` looks for others. Neither times them.
settings.register_profile("same-examples", derandomize=True, deadline=None)
settings.register_profile("new-examples", deadline=None)
settings.load_profile("same-examples")
# Set before the first rank is forked: many small processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# NVIDIA's container images have fp32 products rounded to TF32 by this, and tests compare them with whole ones.
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
torch.set_float32_matmul_precision("highest")
# A shell's `command &` ignores these, its children too, and no script can undo it: tests send them.
for signal_number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(signal_number) is signal.SIG_IGN:
        signal.signal(signal_number, action)


def pytest_configure(config: pytest.Config) -> None:
    """Tests are of the CPU wherever they run, but those that are asked for by `-m gpu`."""
    wanted = config.option.markexpr
    if "gpu" not in wanted or "not gpu" in wanted:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Garbage collections of tests need not look at what is there before the first: objects of all modules and tests."""
    gc.freeze()


@pytest.fixture
def own_world() -> Iterator[None]:
    """The test initialises torch.distributed and mpu itself; they are torn down afterwards."""
    from megazero import mpu

    yield
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_rank(own_world: None) -> None:
    """torch.distributed and mpu initialised with one rank."""
    from megazero import comm, mpu

    comm.init_distributed("gloo")
    mpu.initialize_model_parallel(1)


@pytest.fixture
def make_stale(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Files whose path ends so cannot be looked at from then on, which pathlib takes for missing, as from Python 3.14 on."""

    def make(name: str) -> None:
        def refusing(call):
            def refuse(path, *args, **options):
                if not isinstance(path, int) and f"/{os.fsdecode(path)}".endswith(f"/{name}"):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
                return call(path, *args, **options)

            return refuse

        for method, answer in {"exists": "exists", "is_file": "isfile", "is_symlink": "islink"}.items():
            monkeypatch.setattr(Path, method, getattr(os.path, answer))
        for module, function in ((os, "stat"), (os, "lstat"), (builtins, "open"), (io, "open")):
            monkeypatch.setattr(module, function, refusing(getattr(module, function)))
        monkeypatch.setattr(Path, "stat", lambda path, **options: os.stat(path, **options))  # Python 3.10's has its own

    return make


@pytest.fixture
def unreadable() -> Path:
    """A file of which no read succeeds, as on a disk that fails: Linux's /proc/self/mem, whose beginning nobody may read."""
    path = Path("/proc/self/mem")
    if not path.exists():
        pytest.skip("needs Linux's /proc")
    return path


@pytest.fixture
def mapped_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be removed while this process maps it, as on SMB shares."""
    unlink = os.unlink

    def unlink_unmapped(path, **options) -> None:
        if os.path.isabs(path) and str(path) in Path("/proc/self/maps").read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, **options)

    def unlink_path(path: Path, missing_ok: bool = False) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    monkeypatch.setattr(os, "unlink", unlink_unmapped)
    monkeypatch.setattr(Path, "unlink", unlink_path)  # Python 3.10's own calls what os.unlink was at pathlib's import


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a tiny tokenized corpus and its vocabulary."""
    from tests.tiny import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))

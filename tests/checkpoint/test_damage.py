"""Damage of every kind to the files of a checkpoint: every load ends in a clear error on all ranks, or in what was saved."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megazero import comm, mpu
from megazero.checkpoint import tensor_file
from megazero.checkpoint.format import CheckpointError, index_bytes
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tags import latest_tag
from megazero.engine import Engine
from megazero.optim.lr_schedule import AnnealingLR, LRScheduleConfig
from megazero.zero import ZeroConfig
from tests.checkpoint.engines import engine_of
from tests.ranks import run_ranks
from tests.traced import traced_peak

NEWEST = "global_step3"
EXPECTED = (CheckpointError, ValueError, FileNotFoundError)
Damage = tuple[str, Callable[[Path], Any]]  # what is done, and the function that does it to a checkpoint's directory


class Net(nn.Module):
    """Cut in stacked matrices, with padding, and not at all; a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = mpu.VocabParallelEmbedding(13, 4, padded_num_embeddings=16)
        self.up = mpu.ColumnParallelLinear(4, 12, gather_output=False, stride=3)
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.up(x).square().mean() + self.frozen(x).square().mean()


def make_engine(stage: int = 1) -> Engine:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    schedule = partial(AnnealingLR, config=LRScheduleConfig(lr=0.02), train_iters=10)
    options = {"zero": ZeroConfig(stage=stage), "lr_scheduler": schedule}
    return engine_of(Net(), torch.optim.AdamW, lr=0.02, decay=0.1, **options)


def digest(engine: Engine) -> int:
    """Of everything that this rank has loaded."""
    flat = [bucket.states["master"].resident for bucket in engine.buckets if bucket.is_trainable]
    values = [state[key] for state in engine.optimizer.state.values() for key in sorted(state)]
    tensors = [*flat, *values, *engine.module.state_dict().values(), torch.get_rng_state()]
    found = zlib.crc32(repr((engine.global_steps, engine.get_lr())).encode())
    for tensor in tensors:
        found = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(), found)
    return found


def save_case(directory: str, block_bytes: int) -> list[int]:
    """Saves global_step1 to 3, and returns the digests at each."""
    tensor_file.BLOCK_BYTES = block_bytes
    engine = make_engine()
    digests = []
    for step in range(1, 4):
        engine.backward(engine(torch.randint(0, 13, (2, 5))))
        engine.step()
        client = {"step": step, "mean": torch.arange(200.0) * step, "history": (1, float("inf"))}
        engine.save_checkpoint(directory, client_state=client)
        digests.append(digest(engine))
    return digests


@contextmanager
def damaged(directory: Path, damage: Callable[[Path], Any]) -> Iterator[None]:
    """All checkpoints as they were, but for what `damage` does to the newest; the first rank does it and undoes it."""
    kept = directory.with_name(f"{directory.name}_kept")

    def begin() -> None:
        shutil.copytree(directory, kept)
        damage(directory / NEWEST)

    def undo() -> None:
        shutil.rmtree(directory)
        kept.rename(directory)

    is_first = torch.distributed.get_rank() == 0
    comm.together(begin if is_first else None)
    try:
        yield
    finally:
        comm.barrier()
        comm.together(undo if is_first else None)


def attempt(engine: Engine, directory: Path, **options: Any) -> tuple[str, str]:
    """("loaded", tag and digest), or the class and message of the error."""
    try:
        path, client = engine.load_checkpoint(str(directory), **options)
    except Exception as error:
        return type(error).__name__, str(error)
    step = client.get("step") if isinstance(client, dict) else None
    assert options.get("tag") or path.name == f"global_step{step}"
    return "loaded", f"{path.name} {digest(engine)}"


# ---- the files


def flip(file: str, bit: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray((path / file).read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        (path / file).write_bytes(bytes(content))

    return damage


def cut(file: str, part: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / file, int((path / file).stat().st_size * part))


def put(file: str, content: Callable[[Path], bytes]) -> Callable[[Path], None]:
    return lambda path: (path / file).write_bytes(content(path))


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def directory_instead(file: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / file).unlink()
        (path / file).mkdir()

    return damage


def file_damages(path: Path, flips: int) -> list[Damage]:
    """Everything that happens to a file, for every file of the checkpoint."""
    rng, found = random.Random(0), []
    ranks = ["rank_00000.safetensors", "rank_00001.safetensors"]
    for file in ["index.json", *ranks]:
        bits = 8 * (path / file).stat().st_size
        for part in (0, 0.01, 0.5, 0.999):
            found.append((f"{file}: cut to {part}", cut(file, part)))
        found += [(f"{file}: bit {bit}", flip(file, bit)) for bit in sorted(rng.sample(range(bits), flips))]
        found += [
            (f"{file}: deleted", lambda path, file=file: (path / file).unlink()),
            (f"{file}: is a directory", directory_instead(file)),
            (f"{file}: one byte more", put(file, lambda path, file=file: (path / file).read_bytes() + b"\0")),
            (f"{file}: zeros", put(file, lambda path, file=file: bytes((path / file).stat().st_size))),
            (f"{file}: a pickle", put(file, lambda path: pickle.dumps(Bomb(str(path.parent.parent / "canary"))))),
            (
                f"{file}: of another checkpoint",
                put(file, lambda path, file=file: (path.parent / "global_step2" / file).read_bytes()),
            ),
        ]
    found += [("swapped", swap), ("swapped, of equal sizes", equal_sizes_and_swapped)]
    for file, other in (ranks, ranks[::-1], ["index.json", ranks[0]], [ranks[1], "index.json"]):
        found.append((f"{file}: is {other}", put(file, lambda path, other=other: (path / other).read_bytes())))
    return found


def swap(path: Path) -> None:
    """Each of the two ranks' files under the other's name."""
    first, second = path / "rank_00000.safetensors", path / "rank_00001.safetensors"
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)


def equal_sizes(path: Path) -> None:
    """Both files of one size, then swapped."""
    index = json.loads((path / "index.json").read_bytes())
    size = max(entry["bytes"] for entry in index["files"].values())
    for name, entry in index["files"].items():
        content = (path / name).read_bytes().ljust(size, b"\0")
        (path / name).write_bytes(content)
        blocks = range(0, size, index["block_bytes"])
        entry.update(bytes=size, crc32=[zlib.crc32(content[at : at + index["block_bytes"]]) for at in blocks])
    write_index(path, index)


def equal_sizes_and_swapped(path: Path) -> None:
    equal_sizes(path)
    swap(path)


def write_index(path: Path, index: dict[str, Any]) -> None:
    """As one would who means harm: its checksum is right."""
    (path / "index.json").write_bytes(index_bytes(index))


def index_bits_case(directory: str, count: int) -> list[str]:
    """Errors of Reader, by class, for flipped bits of the index."""
    path, rng = Path(directory) / NEWEST / "index.json", random.Random(1)
    content = path.read_bytes()
    found = []
    try:
        for bit in rng.sample(range(8 * len(content)), count):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes(changed))
            try:
                Reader(directory, NEWEST)
                found.append(f"loaded, bit {bit}")
            except CheckpointError as error:
                found.append("" if str(path) in str(error) or NEWEST in str(error) else str(error))
    finally:
        path.write_bytes(content)
    return found


def test_every_flipped_bit_of_the_index_is_found(world, tmp_path):
    save_case(str(tmp_path), 1 << 20)
    assert set(index_bits_case(str(tmp_path), 300)) == {""}


# ---- going back to an older one


def blob_damage(rank: int, key: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        index = json.loads((path / "index.json").read_bytes())
        number, offset, _, _ = index["blobs"][rank][key]
        flip(list(index["files"])[number], 8 * (offset + 300))(path)

    return damage


def weight_damage(path: Path) -> None:
    """In what the second rank alone reads."""
    index = json.loads((path / "index.json").read_bytes())
    pieces = [piece for entry in index["tensors"].values() if entry["kind"] == "trained" for piece in entry["pieces"]]
    piece = next(piece for piece in pieces if piece[3] == 1)
    flip("rank_00001.safetensors", 8 * piece[4][0])(path)


def older_index_too(path: Path) -> None:
    weight_damage(path)
    (path.parent / "global_step2" / "index.json").write_text("[1, 2")


FALLBACKS = {
    "weights of rank 1": (weight_damage, "global_step2"),
    "generators of rank 1": (blob_damage(1, "rng/cpu"), "global_step2"),
    "client state": (blob_damage(0, "client/0"), "global_step2"),
    "no file of rank 1": (lambda path: (path / "rank_00001.safetensors").unlink(), "global_step2"),
    "no index": (lambda path: (path / "index.json").unlink(), "global_step2"),
    "no directory": (shutil.rmtree, "global_step2"),
    "the older one too": (older_index_too, "global_step1"),
    "latest leads elsewhere": (lambda path: (path.parent / "latest").write_text("../elsewhere"), NEWEST),
    "latest is missing": (lambda path: (path.parent / "latest").unlink(), NEWEST),
}


def damage_all(path: Path) -> None:
    for tag in ("global_step1", "global_step2", NEWEST):
        weight_damage(path.parent / tag)


# ---- the index


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The way to everything in nested containers."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(value: Any, path: tuple, new: Any) -> Any:
    """A copy with another value at `path`; `...` leaves it out."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


HUGE = (10**6, 10**12, 2**62, 10**30)
WRONG = [..., None, True, 0, -1, 1.5, *HUGE, "x", "../secret", [], {}, [[]], [1, 2], {"x": 1}, [[0, 0, 1, 0, [0]]]]
MUST_FAIL = {
    "format",
    "format_version",
    "files",
    "model_parallel_size",
}  # elsewhere a wrong value may mean something


def limit_memory(more_bytes: int) -> None:
    """From here on, more than that is not to be had."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, resource.RLIM_INFINITY))


def walk_case(directory: str, stride: int) -> tuple[int, list[str], dict[str, int]]:
    """How many loads, those that ended otherwise than they may, and how many loaded by the key that was wrong."""
    save_case(directory, 1 << 20)
    mpu.destroy_model_parallel()
    path = Path(directory) / NEWEST
    index = json.loads((path / "index.json").read_bytes())
    engine = make_engine()
    limit_memory(1 << 30)
    changes = [(place, wrong) for place in places(index) if place for wrong in WRONG]
    bad, loaded = [], {}
    for place, wrong in changes[::stride]:
        changed = replaced(index, place, wrong)
        if changed == index and repr(changed) == repr(index):
            continue
        write_index(path, changed)
        start = time.process_time()  # a busy machine may take its own
        try:
            engine.load_checkpoint(directory)
            loaded[place[0]] = loaded.get(place[0], 0) + 1
        except EXPECTED as error:
            if str(path) not in str(error):
                bad.append(f"{place} = {wrong!r}: names no directory: {error}")
        except BaseException as error:
            bad.append(f"{place} = {wrong!r}: {type(error).__name__}: {error}")
        if time.process_time() - start > 5:
            bad.append(f"{place} = {wrong!r}: took {time.process_time() - start:.1f} s")
    write_index(path, index)
    return len(changes[::stride]), bad, loaded


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_wrong_values_anywhere_in_the_index_end_in_a_clear_error(tmp_path, stride):
    ((count, bad, loaded),) = run_ranks(1, walk_case, str(tmp_path), stride, timeout_s=280)
    assert count > 300 and not bad, f"{len(bad)} of {count}:\n" + "\n".join(bad[:20])
    assert not loaded.keys() & MUST_FAIL and sum(loaded.values()) < count / 3, loaded


MALFORMED = "index.json is malformed at its top level"
TEXTS = {
    b"": MALFORMED,
    b"{": MALFORMED,
    b'{"a": 1': MALFORMED,
    b"\xff\xfe{}": MALFORMED,
    b"not json": MALFORMED,
    b"[]": MALFORMED,
    b"[1, 2]": MALFORMED,
    b"3": MALFORMED,
    b'"text"': MALFORMED,
    b"null": MALFORMED,
    b"[" * 10**6: MALFORMED,
    b'{"a":' * 10**5: MALFORMED,
    b'{"format": "megazero", "format_version": 2, "lr": NaN}': "NaN is no number in JSON",
    b'{"format": "megazero", "format_version": 2}': "its checksum is not that of what it holds",
    b'{"format": "megazero", "format_version": 3}': "has format megazero, version 3; this version reads",
    b'{"format": [], "format_version": {}}': "has format",
}


def renamed(name: str) -> Callable[[Path], None]:
    """The index calls a rank's file otherwise, and outside of the checkpoint lies a file that would do."""

    def damage(path: Path) -> None:
        index = json.loads((path / "index.json").read_bytes())
        good = (path / "rank_00001.safetensors").read_bytes()
        (path.parent / "secret").write_bytes(good)
        (path / "inside").mkdir()
        (path / "inside" / "secret").write_bytes(good)
        name_ = name.replace("ABSOLUTE", str(path.parent))
        index["files"] = {(name_ if old == "rank_00001.safetensors" else old): e for old, e in index["files"].items()}
        write_index(path, index)

    return damage


NAMES = [
    "../secret",
    "ABSOLUTE/secret",
    "inside/secret",
    "./../secret",
    "..",
    ".",
    "",
    "/",
    "a\0b",
    "..\\secret",
    "x\n",
]


POINTERS = [b"", b" ", b"../elsewhere", b"/etc", b"a/b", b".hidden", b"..", b"a\0b", b"\xff\xfe", b"a\nb", b"A" * 5000]


def change_pieces(change: Callable[[list], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        index = json.loads((path / "index.json").read_bytes())
        change(index["tensors"]["up.weight"]["pieces"])
        write_index(path, index)

    return damage


def stretch(pieces: list) -> None:
    pieces[0][2] += 1


def shift(pieces: list) -> None:
    for piece in pieces:
        piece[1], piece[2] = piece[1] + 1, piece[2] + 1


def beyond(pieces: list) -> None:
    pieces[0][4] = [offset + 10**6 for offset in pieces[0][4]]


def negative(pieces: list) -> None:
    pieces[0][4][0] = -64


def no_file(pieces: list) -> None:
    pieces[0][3] = 2


def no_integer(pieces: list) -> None:
    pieces[0][1] = float(pieces[0][1])


PIECES = {
    "overlap": stretch,
    "outside of the parameter": shift,
    "twice": lambda pieces: pieces.append(pieces[0]),
    "missing": lambda pieces: pieces.pop(),
    "none": lambda pieces: pieces.clear(),
    "beyond the file": beyond,
    "negative": negative,
    "empty": lambda pieces: pieces.append([pieces[-1][0], pieces[-1][2], *pieces[-1][2:]]),
    "of no file": no_file,
    "from no integer on": no_integer,
    "of no rank": lambda pieces: pieces.append([1, *pieces[0][1:]]),
}


# ---- all of these on two ranks, which are started once


def groups(directory: Path) -> dict[str, tuple[dict[str, Any], list[Damage]]]:
    """What is tried: by the name of a group, how it is loaded, and the damages."""
    fallbacks = [(name, damage) for name, (damage, _) in FALLBACKS.items()]
    return {
        "files": ({}, file_damages(directory / NEWEST, 40)),
        "fallback": ({"fallback": True}, [*fallbacks, ("all of them", damage_all)]),
        "no fallback": ({}, fallbacks),
        "texts": ({}, [("", put("index.json", lambda path, text=text: text)) for text in TEXTS]),
        "names": ({}, [(name, renamed(name)) for name in NAMES]),
        "pointers": ({}, [("", put("../latest", lambda path, text=text: text)) for text in POINTERS]),
        "pieces": ({}, [(name, change_pieces(change)) for name, change in PIECES.items()]),
    }


def damage_case(directory: str) -> tuple[dict[str, str], dict[str, list[tuple]]]:
    """What is loaded of undamaged checkpoints, by tag; and by group, the name and outcome of every damage."""
    digests = dict(enumerate(save_case(directory, 256), 1))
    mpu.destroy_model_parallel()
    engine, found, tried = make_engine(), {}, groups(Path(directory))
    comm.barrier()  # no rank damages what another still looks at
    for group, (options, damages) in tried.items():
        found[group] = []
        for name, damage in damages:
            with damaged(Path(directory), damage):
                found[group].append((name, *attempt(engine, Path(directory), **options)))
    return {f"global_step{step}": f"global_step{step} {value}" for step, value in digests.items()}, found


class Outcomes:
    """Of all damages to the checkpoints in `directory`.

    Attributes:
        intact: by rank, what is loaded of each tag.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.by_rank = run_ranks(2, damage_case, self.directory)
        self.intact = [intact for intact, _ in self.by_rank]

    def of(self, group: str) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
        """The name of every damage, and each rank's (class, message)."""
        pairs = zip(*(found[group] for _, found in self.by_rank), strict=True)
        return [(first[0], first[1:], second[1:]) for first, second in pairs]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("saved"))


def test_damaged_files_raise_on_all_ranks_unless_no_rank_reads_what_is_damaged(outcomes):
    unread = 0
    for name, *both in outcomes.of("files"):
        if {kind for kind, _ in both} == {"loaded"}:
            assert ": bit " in name, name  # a file's header, or padding
            assert [text for _, text in both] == [intact[NEWEST] for intact in outcomes.intact], name
            unread += 1
            continue
        for kind, text in both:
            assert kind in ("CheckpointError", "FileNotFoundError") and f"{outcomes.directory}/{NEWEST}" in text, name
    assert unread < 30, "most of the bits matter"
    assert not (Path(outcomes.directory) / "canary").exists(), "a pickle has been unpickled"


def test_damage_that_one_rank_meets_makes_all_ranks_go_back_to_the_same_checkpoint(outcomes):
    wanted = {name: tag for name, (_, tag) in FALLBACKS.items()}
    for name, *both in outcomes.of("fallback"):
        for (kind, text), intact in zip(both, outcomes.intact, strict=True):
            if name in wanted:
                assert (kind, text) == ("loaded", intact[wanted[name]]), name
            else:
                assert kind == "CheckpointError" and "global_step1/rank_00001.safetensors is damaged" in text
                assert "No other checkpoint" in text and "--load-fallback" not in text, "which was given already"


def test_damage_that_one_rank_meets_raises_on_all_ranks(outcomes):
    for name, *both in outcomes.of("no fallback"):
        for kind, text in both:
            # `latest` is read by the first rank, for all.
            assert kind in ("CheckpointError", "FileNotFoundError", "OtherRankError"), (name, kind)
            assert outcomes.directory in text, (name, text)


def test_index_that_is_something_else_is_refused(outcomes):
    for (_, *both), (content, message) in zip(outcomes.of("texts"), TEXTS.items(), strict=True):
        for kind, text in both:
            assert kind == "CheckpointError" and NEWEST in text and message in text, (content[:60], text)
            assert message != MALFORMED or "load another one" in text, text


def test_names_in_the_index_do_not_lead_out_of_the_directory(outcomes):
    for name, *both in outcomes.of("names"):
        for kind, text in both:
            assert kind == "CheckpointError" and "is no name of a file in the checkpoint's own directory" in text, name


def test_latest_with_something_else_in_it_is_refused(outcomes):
    for (_, *both), pointer in zip(outcomes.of("pointers"), POINTERS, strict=True):
        for kind, text in both:
            assert kind in ("CheckpointError", "OtherRankError") and outcomes.directory in text, (
                pointer[:60],
                text[:300],
            )


def test_pieces_that_overlap_or_lie_outside_are_refused(outcomes):
    for name, *both in outcomes.of("pieces"):
        for kind, text in both:
            assert kind == "CheckpointError" and NEWEST in text, (name, kind, text)


# ---- large ones


def large_case(directory: str, what: str, count: int) -> tuple[str, float, float]:
    """The outcome of loading an index with `count` entries, the processor's time that it took in s, and the memory in GiB."""
    save_case(directory, 1 << 20)
    mpu.destroy_model_parallel()
    path = Path(directory) / NEWEST
    index = json.loads((path / "index.json").read_bytes())
    empty = {"kind": "buffer", "shape": [0], "cut": None, "states": {"constant": "F32"}, "pieces": []}
    if what == "tensors":
        index["tensors"].update((f"layers.{i}.unused", empty) for i in range(count))
    else:
        (entry,) = [entry for name, entry in index["tensors"].items() if name == "seen"]
        entry["pieces"] *= count
    write_index(path, index)
    del index
    engine = make_engine()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        engine.load_checkpoint(directory, strict=False)
        outcome = f"{digest(engine)}"
    except EXPECTED as error:
        outcome = str(error)
    seconds = time.process_time() - start
    return outcome, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


@pytest.mark.timeout(900)  # what is measured is the processor's time: a busy machine may take its own
@pytest.mark.parametrize("count", [10**5, pytest.param(10**6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["tensors", "pieces"])
def test_index_of_a_million_entries_is_read_in_seconds_and_little_memory(what, count, tmp_path):
    ((outcome, seconds, memory),) = run_ranks(1, large_case, str(tmp_path), what, count, timeout_s=800)
    if what == "pieces":
        assert "overlaps another" in outcome and str(tmp_path) in outcome
    else:
        assert outcome.isdigit()
    assert seconds < 60e-6 * count + 1 and memory < 2e-6 * count + 0.2, f"{seconds:.1f} s, {memory:.2f} GiB"


def test_pickles_are_never_unpickled_and_latest_tag_reads_little(tmp_path):
    (tmp_path / "latest").write_bytes(pickle.dumps(Bomb(str(tmp_path / "canary"))))
    os.truncate(tmp_path / "latest", 1 << 26)
    with traced_peak() as peak:
        with pytest.raises(CheckpointError, match="latest should hold the name"):
            latest_tag(tmp_path)
        assert peak() < 1 << 20
    assert not (tmp_path / "canary").exists()

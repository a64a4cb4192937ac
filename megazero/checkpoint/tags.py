"""Tags, the names of checkpoints: which there can be, which there are in a directory, and where each of them lies.

Like `reader` a part of the zero_to_fp32.py that lies beside every checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megazero.checkpoint.format import NAME_ONE, CheckpointError

_OF_JOBS = re.compile(r"global_step(\d+)")  # a copy under another name is the user's, and is never deleted
_TAKEN = ("latest", "zero_to_fp32.py")  # other files beside checkpoints
# What a file system says of a path where there is no file. Of one that cannot be looked at now it says something else, and
# Path.is_file, from Python 3.14 on, the same.
NOTHING_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_MAX_TAG = 200  # file systems have names of at most 255 bytes, and the directory aside has a longer one


def tag_of(iteration: int) -> str:
    """The name of the checkpoint after `iteration` optimizer steps."""
    return f"global_step{iteration}"


def step_of(tag: str) -> int:
    """How many optimizer steps a tag says that `tag_of` made; -1 for another one."""
    match = _OF_JOBS.fullmatch(tag)
    return int(match[1]) if match else -1


def _is_tag(tag: str) -> bool:
    is_wrong = not tag or tag.startswith(".") or tag != tag.strip() or re.search(r"[/\\\x00-\x1f\ud800-\udfff]", tag)
    return not (is_wrong or len(os.fsencode(tag)) > _MAX_TAG or tag in _TAKEN)


def check_tag(tag: str) -> str:
    """The tag, if it can name a directory inside of another.

    Raises:
        ValueError: it cannot.
    """
    if not _is_tag(tag):
        raise ValueError(
            f"A checkpoint's tag becomes the name of its directory; {tag[:300]!r} cannot. Leave out slashes, control characters, "
            f"spaces at the ends and a dot in front, take at most {_MAX_TAG} bytes, and none of {', '.join(_TAKEN)}."
        )
    return tag


def read_bytes(path: Path, most: int = -1) -> bytes:
    """What a file holds, or its first `most` bytes.

    Raises:
        OSError: it cannot be read; it names the file.
    """
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError as error:  # of a disk that fails; it does not say which file it was
        raise OSError(error.errno, error.strerror, str(path)) from error


def latest_tag(directory: str | Path) -> str | None:
    """The tag of the newest whole checkpoint in `directory`; None where there is none.

    Raises:
        CheckpointError: the file `latest` holds something else.
    """
    pointer = Path(directory) / "latest"
    try:
        content = read_bytes(pointer, 4096)
    except NOTHING_THERE:
        return None
    try:
        return check_tag(content.decode().strip())
    except ValueError as error:  # UnicodeDecodeError too
        raise CheckpointError(
            f"{pointer} should hold the name of a checkpoint directory and holds {content[:60]!r}. {NAME_ONE}"
        ) from error


def replaced_path(directory: str | Path, tag: str) -> Path:
    """Where a checkpoint rests while a save of the same tag takes its place."""
    return Path(directory) / f".{tag}.replaced"


def tag_at(path: Path) -> str:
    """The tag of the checkpoint at `path`, which may be a `replaced_path`."""
    return path.name[1:].removesuffix(".replaced") if path.name.startswith(".") else path.name


def checkpoint_path(directory: str | Path, tag: str) -> Path:
    """Where the checkpoint is: under its tag, unless a save of the same tag died before it had replaced it."""
    path, replaced = Path(directory) / tag, replaced_path(directory, tag)
    is_there = os.path.exists(replaced)  # Path.exists raises for a name that is too long
    return replaced if is_there and not (path / "index.json").exists() else path


def named(path: str | Path, tag: str | None = None) -> tuple[Path, str | None]:
    """The directory and the tag that `path` and `tag` name, where `path` may be a checkpoint itself.

    Raises:
        ValueError: it is, and there is a `tag`, too.
    """
    one = Path(path).resolve()
    if not (checkpoint_path(one.parent, one.name) / "index.json").is_file():
        return Path(path), tag
    if tag is not None:
        raise ValueError(f"{one} is a checkpoint itself: drop --tag {tag}, or give the directory above it.")
    return one.parent, one.name


def list_tags(directory: str | Path) -> list[str]:
    """Tags of the checkpoints in `directory`, in the order in which they were written.

    Raises:
        OSError: it cannot be known now, where Path.glob leaves out what it cannot look at from Python 3.13 on.
    """
    names: list[str] = []
    with suppress(*NOTHING_THERE, PermissionError):
        names = os.listdir(directory)
    written: dict[str, int] = {}
    for name in sorted(names, key=lambda name: name[0] == "."):
        tag = tag_at(Path(name))
        if _is_tag(tag) and (name == tag or name.endswith(".replaced")):  # the latter died between its two renames
            with suppress(*NOTHING_THERE, PermissionError):  # no checkpoint, or just deleted; or lost+found
                written.setdefault(tag, os.stat(Path(directory, name, "index.json")).st_mtime_ns)
    return sorted(written, key=written.__getitem__)


def tags_to_go_back_to(directory: str | Path, newest: str | None = None) -> list[str]:
    """Tags of the checkpoints in `directory` but `newest`, in the order in which they stand in for it.

    The tags that jobs give go by their steps, as `tags_of_jobs` says; behind them come the user's own, the last written first.
    """
    tags = list_tags(directory)
    of_jobs = tags_of_jobs(tags, newest)
    own = [tag for tag in tags if tag not in of_jobs]
    return [tag for tag in (*reversed(of_jobs), *reversed(own)) if tag != newest]


def listed(directory: str | Path) -> str:
    """For a message, the checkpoints in `directory`, the newest first: "are global_step9, global_step6, mine and 2 more"."""
    tags = tags_to_go_back_to(directory)
    if not tags:
        return "is none"
    more = f" and {len(tags) - 3} more" if len(tags) > 3 else ""
    return f"{'is' if len(tags) == 1 else 'are'} {', '.join(tags[:3])}{more}"


def tags_of_jobs(tags: Iterable[str], newest: str | None) -> list[str]:
    """Those of the tags that jobs give, oldest first: by steps, as times of files are those of a copy, or of a clock set back.

    First comes what lies beyond `newest`, of a run that went back.
    """
    steps = {tag: step for tag in tags if (step := step_of(tag)) >= 0}
    return sorted(steps, key=lambda tag: (steps[tag] <= steps.get(newest or "", steps[tag]), steps[tag]))

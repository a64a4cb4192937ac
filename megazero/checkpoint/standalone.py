"""The script that lies beside every checkpoint: `zero_to_fp32` and the modules that it needs, in one file."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from megazero.files import written_aside

SCRIPT = "zero_to_fp32.py"
_PARTS = ("ranges", "format", "tags", "tensor_file", "pieces", "reader", "weight_files", "zero_to_fp32")
_FUTURE = "from __future__ import annotations\n"
_OWN_IMPORT = re.compile(
    rf"^from megazero\.checkpoint\.(?:{'|'.join(_PARTS)}) import (?:\([^)]*\)|[^\n(]*)\n", re.MULTILINE
)


@cache
def script_text() -> str:
    """The script's source."""
    sources = [Path(__file__).with_name(f"{part}.py").read_text() for part in _PARTS]
    docstring = sources[-1].split('"""')[1]
    bodies = [_OWN_IMPORT.sub("", source.split('"""', 2)[2].replace(_FUTURE, "", 1)).strip() for source in sources]
    head = f'#!/usr/bin/env python3\n"""{docstring}"""\n\n{_FUTURE}'
    return "\n\n\n".join([head.rstrip(), *bodies]) + "\n"


def place_script(directory: Path) -> None:
    """Puts the script into a directory of checkpoints, executable, unless it is there."""
    path, content = directory / SCRIPT, script_text().encode()
    if path.is_file() and path.read_bytes() == content:
        return
    with written_aside(path) as file:
        with suppress(OSError):  # shares that keep no rights: `python zero_to_fp32.py` works all the same
            mode = os.fstat(file.fileno()).st_mode
            os.fchmod(file.fileno(), mode | (mode & 0o444) >> 2)  # for those who may read it
        file.write(content)

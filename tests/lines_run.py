"""How many lines of Python a call runs: the same on every machine, where seconds are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], Any]) -> tuple[Any, int]:
    """What the call returns, and the lines that it has run in this thread; what numpy and other compiled code do counts none."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call(), count
    finally:
        sys.settrace(before)

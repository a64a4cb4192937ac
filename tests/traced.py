"""The memory that Python's objects, and NumPy's, take in a block of code."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def traced_peak() -> Iterator[Callable[[], int]]:
    """Gives a function that tells the most bytes which the block has taken at once so far."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

"""How fast work on files goes and when it will be done: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm

from megazero.logging import printable

logger = logging.getLogger(__name__)

_INTERVAL_S = 30.0  # between log lines


class Progress:
    """Counts documents, bytes of text, tokens, and bytes of input on disk, of which the total is known; used in a `with` block.

    Args:
        total_bytes: of the input on disk.
        log_documents: documents between log lines where no bar is drawn, in place of half a minute; 0 logs none.
    """

    def __init__(self, name: str, total_bytes: int, log_documents: int | None = None) -> None:
        self._name, self._total, self._every = name, total_bytes, log_documents
        self._documents = self._text = self._tokens = 0  # of this run
        self._disk = self._first = 0  # with and of what an earlier run has done
        self._start = self._logged = time.monotonic()
        self._logged_documents = 0
        is_drawn = sys.stderr.isatty()
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc=printable(name), disable=not is_drawn)

    def update(self, documents: int, text_bytes: int, disk_bytes: int, tokens: int = 0) -> None:
        """Adds work that was done."""
        self._documents += documents
        self._text += text_bytes
        self._tokens += tokens
        self._disk += disk_bytes
        if not self._bar.disable:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(disk_bytes)
        elif self._is_due(now := time.monotonic()):
            self._logged, self._logged_documents = now, self._documents
            share = self._disk / max(self._total, 1)
            logger.info("%s: %.0f%%, %s, ETA %s", self._name, 100 * share, self._rates(), self._eta(now))

    def skip(self, disk_bytes: int) -> None:
        """Counts input that an earlier run has done."""
        self._disk += disk_bytes
        self._first += disk_bytes
        self._bar.update(disk_bytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _is_due(self, now: float) -> bool:
        if self._every is None:
            return now - self._logged >= _INTERVAL_S
        return self._every > 0 and self._documents - self._logged_documents >= self._every

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rates = [f"{self._documents / seconds:,.0f} documents/s"] if self._documents else []
        rates.append(f"{self._text / seconds / 1e6:.1f} MB/s")
        return ", ".join([*rates, f"{self._tokens / seconds:,.0f} tokens/s"] if self._tokens else rates)

    def _eta(self, now: float) -> str:
        per_byte = (now - self._start) / max(self._disk - self._first, 1)
        return tqdm.format_interval(per_byte * max(self._total - self._disk, 0))

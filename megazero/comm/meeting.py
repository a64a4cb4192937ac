"""Points at which all ranks of a group must come together, with an error that names those that did not come."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from megazero.logging import if_slow, some

logger = logging.getLogger(__name__)

MOST_NAMED = 16  # ranks, in one error
PATIENCE_S = 30.0  # after which the log says who is missing


class Meeting:
    """Successive meetings of `ranks`, through the store at which they first found each other.

    Unlike a barrier, a store can tell every rank who is missing, whatever the backend. A rank makes only a few requests,
    however many ranks there are, because a single process answers those of all ranks.
    """

    def __init__(self, store: dist.Store, ranks: list[int], rank: int, timeout_s: float) -> None:
        """`ranks` are ranks of the world, `rank` is this one's index among them; nothing else may use keys of `store`.

        The store also counts the meetings, so another `Meeting` object with the same ranks and store continues the count.
        """
        self._store, self._ranks, self._rank, self._timeout_s = store, ranks, rank, timeout_s

    def hold(self, what: str) -> None:
        """Returns when every rank has come with the same `what`.

        Raises:
            RuntimeError: some ranks did not come within the timeout, or came with another `what`.
        """
        count = self._store.add(f"count/{self._rank}", 1)
        place = f"{count}/"
        here = f"{what} was called on rank {self._ranks[self._rank]}"
        self._store.set(f"{place}{self._rank}", "here")
        mine = f"{what} on rank {self._ranks[self._rank]}"
        first = self._store.compare_set(f"{place}first", "", mine).decode()  # that of whoever came first
        if _call(first) != what:
            self._store.set(f"{place}end", mine)  # tells those who wait
            raise RuntimeError(_different(here, first))
        if self._store.add(f"{place}arrived", 1) == len(self._ranks):
            self._store.set(f"{place}end", first)
        # Who has waited longest says it for all.
        with if_slow(PATIENCE_S, partial(self._tell_missing, place, what)) if first == mine else nullcontext():
            self._wait(place, here)
        end = self._store.get(f"{place}end").decode()
        if _call(end) != what:
            raise RuntimeError(_different(here, end))
        if count > 1:  # all ranks are past that one
            self._forget(count - 1)

    def compare(self, what: str, lines: list[str]) -> None:
        """Returns when every rank has come with the same `lines`.

        Args:
            what: as for `hold`; used only once.
            lines: one for each collective that this rank has issued so far.

        Raises:
            RuntimeError: on every rank: some ranks did not come; or a rank's lines differ from those of the first rank. The
                message names the first difference.
        """
        text = "\n".join(lines)  # kilobytes, which a single process would have to send to every rank
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if self._rank == 0:
            self._store.set(f"{what}/lines", text)
            self._store.set(f"{what}/digest", digest)
        self.hold(f"{what}, listed")
        if self._store.get(f"{what}/digest").decode() != digest:
            theirs = self._store.get(f"{what}/lines").decode().splitlines()
            pairs = enumerate(zip_longest(theirs, lines, fillvalue="nothing more"), start=1)
            number, (expected, found) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
            self._store.set(
                f"{what}/difference",
                f"{what}: of the collectives before it number {number} is {expected} on rank {self._ranks[0]}, and {found} on "
                f"rank {self._ranks[self._rank]}. Every rank must run the same units in the same order: look for what in the "
                "model depends on the data or the rank.",
            )
        self.hold(f"{what}, compared")
        if self._store.check([f"{what}/difference"]):
            raise RuntimeError(self._store.get(f"{what}/difference").decode())
        if self._rank == 0:
            self._store.delete_key(f"{what}/lines")
            self._store.delete_key(f"{what}/digest")

    def _wait(self, place: str, here: str) -> None:
        try:
            self._store.wait([f"{place}end"], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = self._missing(self._store, place)
            if not missing:
                raise RuntimeError(f"{here}, and the ranks could not meet: {error}") from error
            raise RuntimeError(
                f"{here}, but within {self._timeout_s:g} s not on ranks {named(missing)} of {named(self._ranks)}. "
                "It was called on some ranks only: call it on every rank."
            ) from None

    def _tell_missing(self, place: str, what: str) -> None:
        store: Any = self._store  # torch's stubs lack its `clone`
        with suppress(RuntimeError):  # no connection to the store: the error of the wait will say so
            if missing := self._missing(store.clone(), place):  # at the other connection, this rank waits
                logger.warning(
                    "%s was called on rank %d, and %g s later not yet on ranks %s of %s; waiting for %g s in all",
                    *(what, self._ranks[self._rank], PATIENCE_S, named(missing), named(self._ranks), self._timeout_s),
                )

    def _missing(self, store: dist.Store, place: str, numbers: range | None = None) -> list[int]:
        """The ranks among those of these numbers, all by default, that have not come.

        It asks for many at once, and then for those in each half: all ranks ask at the same time, and a request for each of
        thousands would keep the store busy for minutes.
        """
        numbers = range(len(self._ranks)) if numbers is None else numbers
        if store.check([f"{place}{number}" for number in numbers]):
            return []
        if len(numbers) == 1:
            return [self._ranks[numbers[0]]]
        half = len(numbers) // 2
        return [*self._missing(store, place, numbers[:half]), *self._missing(store, place, numbers[half:])]

    def _forget(self, count: int) -> None:
        for name in (str(self._rank), *(("first", "arrived", "end") if self._rank == 0 else ())):
            self._store.delete_key(f"{count}/{name}")


def named(ranks: Sequence[int]) -> str:
    """The ranks as errors name them, the first ones of many: "[0, 1]"."""
    return f"[{some([str(rank) for rank in ranks], MOST_NAMED)}]"


def meet_world(what: str, timeout_s: float) -> None:
    """Returns when every rank of the world has come here with the same `what`. Waiting takes neither a device nor a core.

    Raises:
        RuntimeError: some ranks did not come within `timeout_s` seconds, or came with another `what`.
    """
    ranks = list(range(dist.get_world_size()))
    if len(ranks) > 1:
        store = dist.PrefixStore("megazero/world/", dist.distributed_c10d._get_default_store())
        Meeting(store, ranks, dist.get_rank(), timeout_s).hold(what)


def _call(mine: str) -> str:
    """What was called, of "save_checkpoint on rank 3"."""
    return mine.rpartition(" on rank ")[0]


def _different(here: str, other: str) -> str:
    return f"{here}, but {other}. Call the same on every rank, in the same order."

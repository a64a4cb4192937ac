"""Which accesses to memory come one after the other, whatever the timing, and which do not: vector clocks.

Every agent (a thread of the host, a stream of a device) counts its own steps and knows how far it has seen the others: those of
their steps that are over before its next one begins (Lamport, 1978; Mattern, 1989). Two accesses to one place, of which one at
least writes, are a race unless one agent had seen the other's step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

ROOT = str(Path(__file__).parent.parent)
MOST_FRAMES = 6  # of the project, of an access in a report
Clock = dict["Agent", int]
Frames = tuple[tuple[CodeType, int], ...]


class Agent:
    """Does one step after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def __repr__(self) -> str:
        return self.name

    def step(self) -> int:
        """The number of a new step."""
        self.clock[self] += 1
        return self.clock[self]

    def see(self, clock: Clock) -> None:
        """What happened up to `clock` is over before the next step."""
        mine = self.clock
        for agent, step in clock.items():
            if mine.get(agent, 0) < step:
                mine[agent] = step

    def place(self) -> Clock:
        """Where it is."""
        return dict(self.clock)


@dataclass(frozen=True, eq=False, slots=True)
class Access:
    """What one step did to bytes [low, high) of a block."""

    low: int
    high: int
    agent: Agent
    step: int
    writes: bool
    what: str
    frames: Frames

    def is_seen(self, clock: Clock) -> bool:
        """Whether it is over at `clock`."""
        return clock.get(self.agent, 0) >= self.step

    def describe(self) -> str:
        """Who did what, and from where in the project, innermost first."""
        kind = "writes" if self.writes else "reads"
        lines = [f"    {self.agent}, step {self.step}: {self.what} {kind} bytes {self.low} to {self.high}"]
        for code, line in self.frames:
            lines.append(f"        {code.co_filename.removeprefix(ROOT)[1:]}:{line} {code.co_name}")
        return "\n".join(lines)


@dataclass(eq=False)
class Block:
    """Memory, and the accesses to it that a later one may still be too early for."""

    name: str
    accesses: list[Access] = field(default_factory=list)

    def access(self, new: Access) -> list[Access]:
        """Takes an access; the earlier ones that it races with."""
        clock, found, kept = new.agent.clock, [], []
        for old in self.accesses:
            overlaps = old.low < new.high and new.low < old.high
            is_seen = old.is_seen(clock)
            if overlaps and (old.writes or new.writes) and not is_seen:
                found.append(old)
            # Whatever sees the new one has seen the old one, and races with both or none.
            is_within = new.low <= old.low and old.high <= new.high
            if not (is_within and is_seen and (new.writes or (not old.writes and old.agent is new.agent))):
                kept.append(old)
        self.accesses = [*kept, new]
        return found

    def unseen(self, *clocks: Clock) -> list[Access]:
        """The accesses that are over at none of these."""
        return [access for access in self.accesses if not any(access.is_seen(clock) for clock in clocks)]


def frames_of_the_project() -> Frames:
    """The innermost places of the project, without this file and those that carry `is_machinery` as a global."""
    return tuple(islice(_frames(sys._getframe(1)), MOST_FRAMES))


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOT) and "is_machinery" not in frame.f_globals:
            yield frame.f_code, frame.f_lineno
        frame = frame.f_back


is_machinery = True

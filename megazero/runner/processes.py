"""Processes of a launch: torchrun on this machine, and the agents of several machines.

Signals. torchrun responds to SIGTERM by killing its ranks after 30 seconds, which would cut a save short. So it runs in a session
of its own, where neither Ctrl-C nor a batch system reaches it, and `Node.stop` sends SIGTERM to the ranks: they finish and save
if they are able to, and otherwise end. `Node.end` is for a job that has failed elsewhere, and for SIGQUIT (Ctrl-\\): it ends
torchrun, and with it the ranks.

Several machines. Each machine has an agent (megazero.runner.agent) that runs torchrun there and reads its own standard input: one
byte means stop, and the end of the input means end. That input is a pipe from this process, through ssh if the machine is
another one. The remote ranks therefore end when a node fails and the pipes are closed, and also when this process is killed.
This needs no pseudo-terminals and no second connection. (torchrun's own agents would not notice: under its static rendezvous,
each one watches only its own ranks.) A network that fails without a word ends nothing until ssh or sshd notices. There is no
heartbeat, because a network that comes back, or a launcher that is stopped for a while (Ctrl-Z), should not end a job.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from megazero.children import STOP_SIGNALS, children, end_with_parent
from megazero.files import allow_many_files

logger = logging.getLogger(__name__)

POLL_S = 0.1
RESTART_POLL_S = 1.0  # a rank takes longer to import torch
GRACE_S = 2.0  # after the first node has failed: ranks elsewhere that lost a partner may be writing why
LAST_S = 60.0  # after that, until agents are killed; torchrun kills ranks that do not end within 30 s
KILLED = 128 + signal.SIGKILL


class Node:
    """torchrun on this machine, in a session of its own."""

    def __init__(self, command: Sequence[str], stdin: int | None = None) -> None:
        # It ends with this process, also while its Python starts. A shell in which somebody typed the command is another matter:
        # under nohup, torchrun outlives it.
        ends = partial(end_with_parent, signal.SIGTERM, os.getpid())
        self.process = subprocess.Popen(command, stdin=stdin, start_new_session=True, preexec_fn=ends)
        self._is_stopping = False

    def stop(self) -> None:
        """Sends SIGTERM to the ranks, or to torchrun itself if there are none yet; --max-restarts starts none of them again."""
        ranks = children(self.process.pid)
        for pid in ranks or [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if ranks and not self._is_stopping:
            self._is_stopping = True
            threading.Thread(target=self._end_if_restarted, args=(set(ranks),), daemon=True).start()

    def _end_if_restarted(self, ranks: set[int]) -> None:
        """Ends torchrun when it has other ranks than those that were told to end.

        A rank that SIGTERM ends, because it does not handle the signal yet, has failed for torchrun.
        """
        while self.process.poll() is None:
            if set(children(self.process.pid)) - ranks:
                self.end()
                return
            time.sleep(RESTART_POLL_S)

    def end(self) -> None:
        """Makes torchrun end its ranks, with SIGKILL after 30 seconds."""
        self.process.terminate()

    def wait(self) -> int:
        """The exit status: torchrun's, or 128 + the number of the signal that ended it."""
        with stop_signals(self.stop, self.end):
            status = self.process.wait()
        return status if status >= 0 else 128 - status


@contextmanager
def stop_signals(stop: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Inside the block, the STOP_SIGNALS call `stop()`, SIGQUIT calls `end()`, and each is logged: ranks see only SIGTERM.

    Under nohup, SIGHUP stays ignored.
    """
    actions: dict[int, Callable[[], object]] = {**dict.fromkeys(STOP_SIGNALS, stop), signal.SIGQUIT: end}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del actions[signal.SIGHUP]

    def act(number: int, _: object) -> None:
        logger.warning("the launcher got %s: it ends the job, whose ranks get SIGTERM", signal.Signals(number).name)
        actions[number]()

    before = {number: signal.signal(number, act) for number in actions}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_nodes(commands: Mapping[str, Sequence[str]]) -> int:
    """Runs one agent per host and returns the job's exit status: 0, or that of the node that failed first.

    A rank that lost its partner fails too, and may be noticed first. So a node that reports within GRACE_S that one of its ranks
    was killed (status 137) is taken to be the cause.
    """
    allow_many_files()  # the pipe of each host stays open
    agents = {
        host: subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        for host, command in commands.items()
    }

    def stop() -> None:
        for agent in agents.values():
            with suppress(OSError, ValueError):  # it has ended, or its pipe is closed
                os.write(agent.stdin.fileno(), b".")  # type: ignore[union-attr]

    def end() -> None:
        for agent in agents.values():
            agent.stdin.close()  # type: ignore[union-attr]

    with stop_signals(stop, end):
        failed = _watch(agents, end)
    if not failed:
        return 0
    host = next((host for host, status in failed.items() if status == KILLED), next(iter(failed)))
    hint = " (255 is also ssh's own status: it could not connect, and says why above)" if failed[host] == 255 else ""
    logger.error("host %s ended with exit status %d%s; all nodes were ended.", host, failed[host], hint)
    return failed[host]


def _watch(agents: Mapping[str, subprocess.Popen], end: Callable[[], object]) -> dict[str, int]:
    """Waits for all agents, and calls `end` when one has failed; the statuses of those that failed by themselves, in order."""
    failed: dict[str, int] = {}
    running, since, told = dict(agents), 0.0, False
    while running:
        time.sleep(POLL_S)
        for host, agent in list(running.items()):
            status = agent.poll()
            if status is None:
                continue
            del running[host]
            if status != 0 and not told:
                failed[host] = status if status > 0 else 128 - status
                since = since or time.monotonic()
        waited = time.monotonic() - since if since else 0.0
        if waited > GRACE_S and not told:
            told = True
            end()
        if waited > GRACE_S + LAST_S:
            for agent in running.values():
                agent.kill()
    return failed

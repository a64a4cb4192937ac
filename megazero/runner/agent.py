"""Runs a node's torchrun and passes it signals: `python -m megazero.runner.agent [--obey-stdin] COMMAND...`; see processes.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from megazero.children import keep_exit_statuses
from megazero.runner.processes import Node


def obey(node: Node) -> None:
    """Stops the node's ranks at every byte on standard input, and ends them when the input ends."""
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter exits
        node.stop()
    node.end()


def main() -> None:
    """Exits with the command's status."""
    keep_exit_statuses()
    obeys = sys.argv[1] == "--obey-stdin"
    node = Node(sys.argv[1 + obeys :], stdin=subprocess.DEVNULL if obeys else None)
    if obeys:
        threading.Thread(target=obey, args=(node,), daemon=True).start()
    sys.exit(node.wait())


if __name__ == "__main__":
    main()

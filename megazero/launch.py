"""torchrun with a readable end: `python -m megazero.launch [torchrun's options] script.py [the script's flags]`.

torchrun itself buries a job's own error message under two screens of its traceback; this prints one line per cause.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def describe(rank: int, failure: ProcessFailure) -> str:
    """One line: which rank ended how, and the likely reason where there is one."""
    if failure.exitcode == -signal.SIGKILL:
        return (
            f"rank {rank} was killed (SIGKILL), most likely by the kernel for lack of host memory. Use less memory per rank: "
            "a smaller --batch-size, or --checkpoint-activations."
        )
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}."
    return f"rank {rank} ended with exit status {failure.exitcode}; its message is above."


def main() -> None:
    """Runs torchrun; exits with the status of the rank that failed first."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it repeats what `describe` says
    try:
        run.run(run.parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        print(f"{describe(rank, first)} All ranks of this node were ended.", file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)


if __name__ == "__main__":
    main()

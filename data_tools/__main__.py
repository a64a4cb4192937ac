"""From web text to training-ready tokens, step by step: `python -m data_tools STEP --help`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from tqdm.contrib.logging import logging_redirect_tqdm

from data_tools.registry import ALIASES, STEPS, step_parser, summary
from megazero.logging import log_to_stderr, prepare_output, printable


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a step, and prints one JSON line of statistics."""
    prepare_output()
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return
    step = ALIASES.get(argv[0], argv[0])
    if step not in STEPS:
        sys.exit(f"error: there is no step {argv[0]!r}. The steps are: {', '.join(STEPS)}")
    log_to_stderr()
    try:
        args = step_parser(step).parse_args(argv[1:])
        with logging_redirect_tqdm():  # a message does not tear the bar apart
            result = args.run(args)
        print(json.dumps(result), flush=True)  # ASCII: JSON in every locale, and no command to a terminal
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {printable(_one_line(error))}")


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # without the number of the error
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _overview() -> str:
    rows = []
    width = max(map(len, STEPS)) + 1
    for step in STEPS:
        rows.append(f"  {step:{width}}{summary(step)}")
        if names := [alias for alias, target in ALIASES.items() if target == step]:
            rows.append(f"  {'':{width}}(also: {', '.join(names)})")
    return "\n".join([__doc__ or "", "steps:", *rows])


if __name__ == "__main__":
    main()

"""`python -m megazero.plan`: from a job's flags and the machines that it will run on, what the job needs of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.arguments import COMPONENTS, build, config_of, make_parser, parse
from megazero.config import Config
from megazero.logging import prepare_output, until_reader_leaves
from megazero.option import check_options, option
from megazero.plan.job_plan import Setup, plan_job
from megazero.plan.limits import Limits
from megazero.plan.plot import write_plot
from megazero.plan.report import as_json, as_text

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str, flag: str) -> int:
    """Bytes of "32GB" (10^9), "32GiB" (2^30), "1.5TB" or "32000000000".

    Raises:
        ValueError: it has none of these forms, or is so small that its unit must be missing.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if not match or match[2] not in UNITS:
        raise ValueError(f"{flag} must be a size such as 32GB, 80GiB or 1.5TB, got {text!r}.")
    size = int(float(match[1]) * UNITS[match[2]])
    if float(match[1]) and size < 10**6:
        raise ValueError(f"{flag} {text} is {size} bytes. Give the unit, as in {text}GB.")
    return size


@dataclass(frozen=True)
class Machine:
    """The machines that the job will run on, and what to write."""

    gpus: int = option(1, "total number of ranks, each with its own GPU", at_least=1)
    ranks_per_node: int | None = option(
        None, "ranks that share a host's memory and disk (default: 8, or all if fewer)", at_least=1
    )
    gpu_memory: str | None = option(None, "memory of one GPU, such as 32GB")
    host_memory: str | None = option(None, "memory of one host, such as 1.5TB")
    nvme: str | None = option(None, "free space of one host's disk, such as 14TB")
    device: str = option("cuda", "cpu: ranks without a GPU, which share the host's memory", choices=("cuda", "cpu"))
    json: bool = option(False, "print JSON instead of tables")
    plot: str | None = option(None, "file for a bar plot of all stages, such as plan.png")

    def __post_init__(self) -> None:
        if self.gpus == 0:
            raise ValueError(
                "--gpus must be at least 1, got 0: it counts ranks. If they have no GPUs, add --device cpu."
            )
        check_options(self)
        if self.device == "cpu" and self.gpu_memory is not None:
            raise ValueError(
                f"--gpu-memory {self.gpu_memory} is the memory of a GPU, and with --device cpu there is none: ranks share their "
                "host's. Give --host-memory."
            )

    @property
    def limits(self) -> Limits:
        """What the machines offer.

        Raises:
            ValueError: one of them is not a valid size.
        """
        given = {
            "device": ("--gpu-memory", self.gpu_memory),
            "host": ("--host-memory", self.host_memory),
            "disk": ("--nvme", self.nvme),
        }
        return Limits(**{name: parse_size(text, flag) for name, (flag, text) in given.items() if text is not None})


def load(argv: Sequence[str]) -> tuple[Config, Machine]:
    """The job's configuration and the machines, from the command line and the JSON file that it names.

    Raises:
        ValueError: flags are unknown, wrong, or contradict each other.
    """
    parser = make_parser(
        [Machine, *COMPONENTS], "Plan a GPT-2 job by the flags of pretrain_gpt2.py: does it fit, and what fits?"
    )
    parser.prog = "python -m megazero.plan"
    given = parse(parser, argv)
    (machine,) = build([Machine], given)
    return config_of(given, machine.gpus), machine


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the plan."""
    prepare_output()
    config, machine = load(sys.argv[1:] if argv is None else argv)
    limits = machine.limits
    plan = plan_job(Setup.of(config, machine.gpus, machine.ranks_per_node or 8, machine.device))
    if machine.plot is not None:
        write_plot(plan, limits, Path(machine.plot))
    with until_reader_leaves():
        print(json.dumps(as_json(plan, limits), indent=2) if machine.json else as_text(plan, limits))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")

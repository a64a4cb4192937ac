"""The numbers of a run in a project of Weights & Biases, whose package (`pip install wandb`) nothing else needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megazero.files import write_whole

RUN_FILE = "wandb_run"  # in --save: the run's id, by which a job that is resumed there goes on with it


def require_wandb() -> None:
    """Raises a ValueError if the package is not installed."""
    if getattr(find_spec("wandb"), "origin", None) is None:  # a folder `wandb`, as of earlier runs, has none
        raise ValueError("--wandb-project needs the package wandb, which is not installed: pip install wandb")


class WandbLog:
    """A run in a project of Weights & Biases. What no argument says is as its own variables say: WANDB_MODE, WANDB_ENTITY, ...

    Args:
        directory: holds the run's files, in a folder `wandb`, and its id; None keeps them where WANDB_DIR says, and no id.
        start_iteration: above 0, the run whose id is in `directory` goes on.
        config: shown with the run.

    Raises:
        ValueError: the run cannot start; nobody has logged in, for example.
    """

    def __init__(
        self, project: str, name: str | None, directory: str | None, start_iteration: int, config: dict[str, Any]
    ) -> None:
        import wandb  # takes seconds, and one rank needs it

        path = Path(directory, RUN_FILE) if directory else None
        run_id = path.read_text().strip() if path and start_iteration and path.exists() else None
        try:
            self._run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=directory, config=config)
        except Exception as error:  # of any class: the package's own have none in common
            which = f"--wandb-project {project}" + (f", run {run_id} of {path}" if run_id is not None else "")
            raise ValueError(
                f"{which}: Weights & Biases does not start: {str(error).rstrip('.')}. To keep the numbers in files until "
                "`wandb sync`, set WANDB_MODE=offline."
            ) from error
        # Not its own count of calls: a resumed job repeats iterations, and its points would be dropped.
        self._run.define_metric("*", step_metric="iteration")
        if path:
            write_whole(path, self._run.id.encode())

    @property
    def place(self) -> str:
        """Where the run can be seen: its address, or without one the folder that `wandb sync` takes."""
        url = None if self._run.offline else self._run.url  # offline, wandb warns of the question
        return url or str(Path(self._run.dir).parent)

    def write(self, line: dict[str, Any], scalars: dict[str, float]) -> None:
        """Records the scalars of a line of the metrics.

        Raises:
            OSError: the package's own process has ended.
        """
        named = {f"{line['section']}/{name}": x for name, x in scalars.items()}
        with _told_as_os_error():
            self._run.log({"iteration": line["iteration"], **named})

    def close(self, has_failed: bool = False) -> None:
        """Ends the run, after everything has been sent. Raises as `write` does."""
        with _told_as_os_error():
            self._run.finish(int(has_failed))  # as the exit status of a process


@contextmanager
def _told_as_os_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any class, as above
        raise OSError(str(error)) from error

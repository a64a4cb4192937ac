"""What an asynchronous collective hands back."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Returns when the result may be used (on CUDA: by what the current stream does next). Returns nothing of meaning.

        Raises:
            RuntimeError: the collective failed or timed out; the message says which one, where and why.
        """


class Finished:
    """A collective that had nothing to do: the `Work` of a group of one."""

    def wait(self) -> None:
        """Returns at once."""

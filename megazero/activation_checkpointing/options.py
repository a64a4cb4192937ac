"""How activations are kept: the settings of a checkpointer, which are flags of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.json_config.reader import Reader
from megazero.json_config.sections import CHECKPOINTING, CHECKPOINTING_FIELDS, ActivationCheckpointingSection
from megazero.json_source import DeepSpeedConfigError, read_source
from megazero.option import check_options, option


@dataclass(frozen=True)
class CheckpointSettings:
    """How the inputs of checkpointed (recomputed) calls are kept, and what is watched."""

    partition_activations: bool = option(
        False,
        "with --checkpoint-activations: each tensor-parallel rank keeps its part of every kept activation",
        aliases=("--distribute-checkpointed-activations", "--distribute-saved-activations"),
    )
    contiguous_checkpointing: bool = option(
        False,
        "with --partition-activations: the kept parts lie in one storage, allocated once a forward",
        aliases=("--contigious-checkpointing",),  # the first examples' spelling
    )
    num_checkpoints: int | None = option(
        None, "kept parts that this storage has room for (default: layers / --checkpoint-num-layers)"
    )
    checkpoint_in_cpu: bool = option(False, "activation checkpoints rest in pinned host memory, beside a CUDA device")
    synchronize: bool = option(
        False, "wait for the device before and after each checkpointed call", flag="--synchronize-each-layer"
    )
    profile: bool = option(
        False, "time checkpointed calls in forward and backward, for the log's time line", flag="--profile-backward"
    )
    checkpoint_nvme_path: str | None = option(  # ZeRO-Infinity, arXiv:2104.07857, sec. 5.1.2
        None, "directory on an NVMe drive in which activation checkpoints rest until the backward", per_host=True
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_checkpoints is not None and self.num_checkpoints < 1:
            raise DeepSpeedConfigError(
                f"num_checkpoints must be at least 1, got {self.num_checkpoints} (--num-checkpoints; "
                f"{CHECKPOINTING}.number_checkpoints): it is how many checkpointed calls contiguous storage has room for."
            )
        if self.checkpoint_nvme_path and (self.checkpoint_in_cpu or self.contiguous_checkpointing):
            raise DeepSpeedConfigError(
                "--checkpoint-nvme-path excludes --checkpoint-in-cpu and --contiguous-checkpointing: what a call keeps rests in "
                "one place. Drop all but one of them."
            )
        if self.contiguous_checkpointing and not self.partition_activations:
            raise DeepSpeedConfigError(
                "contiguous_checkpointing (--contiguous-checkpointing; activation_checkpointing.contiguous_memory_optimization) "
                "lays out the parts that partition_activations makes, which is off. Turn that on too "
                "(--partition-activations, or activation_checkpointing.partition_activations); one rank may be all there is."
            )


def settings_from(source: Any, given: Mapping[str, Any]) -> CheckpointSettings:
    """The defaults, then the JSON's `activation_checkpointing` section, then what of `given` is not None.

    Args:
        source: a dict, the path of a JSON file, URL-safe base64 of JSON, or None.
        given: by field name of `CheckpointSettings`.

    Raises:
        DeepSpeedConfigError: a key or a value is wrong, or two of them contradict each other.
    """
    document = {} if source is None else read_source(source)
    section = Reader({}).section(ActivationCheckpointingSection, document.get(CHECKPOINTING) or {}, CHECKPOINTING)
    values = {field: getattr(section, key) for key, field in CHECKPOINTING_FIELDS.items()}
    return CheckpointSettings(**{**values, **{name: value for name, value in given.items() if value is not None}})

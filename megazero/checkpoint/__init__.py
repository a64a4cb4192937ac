"""Checkpoints: safetensors shards and a JSON index. Nothing is unpickled on load.

To read it, begin with docs/checkpoint_format.md; then

- saving: `capture` (what of a run) -> `saver` (all ranks together) -> `writer` (files and index) and `folder` (where they lie)
- loading: `loader` (all ranks together) -> `restore` (what goes where in a run) -> `reader` (any range of any parameter)
- under both: `format` (the index), `tags` (names and places), `tensor_file` (one file), `ranges` and `pieces` (what lies where)
- in a run: `config` (flags of the job), `training_state` (its parts that are saved), `plain` (the user's own state),
  `vocabulary`, `own_model` (which function made the model)
- without a run: `zero_to_fp32` (beside every checkpoint, by `standalone`), `weight_files`, `commands` (of `__main__`),
  `importers`, and `offline`, by which both write checkpoints
"""

from megazero.checkpoint.folder import DirectoryInUseError
from megazero.checkpoint.format import CheckpointError

__all__ = ["CheckpointError", "DirectoryInUseError"]

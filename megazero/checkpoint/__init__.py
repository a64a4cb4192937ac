"""Checkpoints: safetensors shards and a JSON index. Nothing is unpickled on load.

To read it, begin with docs/checkpoint_format.md; then

- saving: `capture` (what of a run) -> `saver` (all ranks together) -> `writer` (files and index), `store` (the directory)
- loading: `loader` (all ranks together) -> `reader` (any range of any parameter), `ranges` -> `restore` (what goes where)
- both: `format` (names), `tensor_file` (one file), `plain` (the user's own state), `training_state`
- without a job: `reshape`, `importers`, `export`, `zero_to_fp32`, `standalone`
- for a person: `__main__` (the commands), `listing`, `compare`, `verify`
"""

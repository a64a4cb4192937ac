"""From web text to training-ready tokens: `python -m data_tools STEP ...` (see `python -m data_tools --help`).

`registry` says which module is which step. What the steps are made of:

- a run: `registry` (command lines), `options` (flags that steps share), `pipeline` (steps by a YAML file), `optional` (packages)
- files: `inputs` (which there are), `shard_plan` (what they become), `done_marker` (what counts as made)
- documents: `documents` (as JSON lines), `parquet` and `warc` (turned into these); `token_files` (as tokens of other trainers)
- work: `line_functions` (of a line, of a document) -> `shards` (on all lines, by `megazero.lines`); `repeats` (of lines);
  `divided` (records on disk)
- `dedup`: `dedup_minhash` -> `dedup_signing` -> `dedup_signatures` -> `dedup_index`; in three steps for ported scripts:
  `find_duplicates`, `group_duplicates`, `remove_group_duplicates`
- of one step each: `blacklists`, `language`, `quality_rules`, `train_*`, `inspect_statistics`, `sample_corpus_*`
- `megatron_names`: scripts with the names that Megatron-LM has for the steps
"""

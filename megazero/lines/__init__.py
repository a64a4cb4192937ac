"""Work on the lines of files, such as tokenizing text: in parallel, in their order, and resumed after a kill.

Read first: `jsonl` (blocks of lines, and the documents on them), `results` (what a worker makes of a block, what is counted, and
what is said of lines that are left out), `partial_shard` (files while they are made), `resumable` (the work itself, done by
`workers`). Beside them: `compressed` (what is in compressed files), `contents` (whether an input is what it was), `outputs` (what
is not to be overwritten) and `progress`.
"""

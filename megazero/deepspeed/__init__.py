"""`import megazero as deepspeed`: DeepSpeed's `initialize` and engine over megazero's own.

Read `api` first: its `initialize` makes the `engine`, which adds DeepSpeed's calls to `megazero.engine.Engine`, those for
checkpoints in `checkpoints`. What the caller brings goes through `optimizer` (with parameter groups), `schedule` and `mpu`.
"""

"""`import megazero as deepspeed`: DeepSpeed's `initialize` and engine on top of megazero's own.

Read `api` first. Its `initialize` makes the `engine`, which adds DeepSpeed's calls to `megazero.engine.Engine`; those for
checkpoints are in `checkpoints`. `optimizer` (with parameter groups), `schedule` and `mpu` adapt what the caller passes in.
"""

"""Plans a job before launch: what it needs of devices, hosts and disks, before anything is allocated.

    python -m megazero.plan --num-layers 48 --hidden-size 1600 --num-attention-heads 25 --vocab-size 50257 \\
        --zero-stage 2 --bf16 --gpus 8 --gpu-memory 32GB

takes the job's own flags and prints tables. `plan_job` gives the same numbers to a program, and `check_fits` reports what does
not fit and which setting to change.
"""

from megazero.plan.activations import Shape, block_bytes, plan_activations
from megazero.plan.change import changes
from megazero.plan.fit import check_fits, largest_batch, largest_model, what_to_change
from megazero.plan.job_plan import JobPlan, Setup, activation_modes, plan_job
from megazero.plan.limits import Limits, measure_limits
from megazero.plan.refuse import refuse_what_cannot_fit, ways_to_less_memory
from megazero.plan.states import gpt2_buckets

__all__ = [
    "JobPlan",
    "Limits",
    "Setup",
    "Shape",
    "activation_modes",
    "block_bytes",
    "changes",
    "check_fits",
    "gpt2_buckets",
    "largest_batch",
    "largest_model",
    "measure_limits",
    "plan_activations",
    "plan_job",
    "refuse_what_cannot_fit",
    "ways_to_less_memory",
    "what_to_change",
]

"""Names that DeepSpeed, FSDP or DDP has and megazero lacks, each with what to do instead, for a ported script's error."""

from __future__ import annotations

_INFERENCE = (
    "there is no inference engine. initialize(model=, config=) without an optimizer gives an engine that evaluates"
)
_PIPELINE = "pipeline parallelism is not built. Split layers by an mpu, or shard them by ZeRO stage 3"
_MOE = "mixtures of experts are not built. initialize(zero_units=[...]) trains one of the model's own, as a unit"
_OFFLOAD = "what rests in host memory is chosen in the configuration, by offload_optimizer and offload_param"
_PROFILING = "torch.profiler measures time, and torch.utils.flop_counter.FlopCounterMode counts operations"
_METRICS = "the engine writes no metrics. Log the loss, get_lr() and get_global_grad_norm() in the script"
_WHOLE = "module_state_dict() is whole at every stage, whatever the configuration says"
_GATHERED = "zero.GatheredParameters(parameters) makes them whole"
_RUNTIME = (
    "ZeroParamStatus is in megazero.zero, zero_to_fp32 in megazero.utils, schedules are in megazero.optim.schedules, "
    "activation_checkpointing.checkpointing is megazero.checkpointing, and what see_memory_usage shows is "
    "get_accelerator().memory_allocated() and max_memory_allocated()"
)

OF_MODULE = {
    "DeepSpeedConfig": "megazero.json_config.load_json_config(source, world_size=...) reads and checks a configuration",
    "DeepSpeedTransformerLayer": "there are no fused layers. Use the model's own",
    "InferenceEngine": _INFERENCE,
    "OnDevice": "build the model under zero.Init, which never holds all of it",
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "init_inference": _INFERENCE,
    "log_dist": 'use logging.getLogger("megazero")',
    "moe": _MOE,
    "monitor": _METRICS,
    "pipe": _PIPELINE,
    "profiling": _PROFILING,
    "runtime": _RUNTIME,
    "tp_model_init": "a model is split by its layers (megazero.mpu), or by an mpu that is given to initialize",
}
OF_ENGINE = {
    "_zero3_consolidated_16bit_state_dict": _WHOLE,
    "clip_grad_norm_": "gradient_clipping in the configuration clips at every update",
    "coalesce_grad_reduction": "set_gradient_accumulation_boundary(False) before a backward says that more follow",
    "eval_batch": _PIPELINE,
    "join": "every rank takes equally many steps: leave the loop together, before the first rank has no batch",
    "monitor": _METRICS,
    "offload_states": _OFFLOAD,
    "optimizer_name": "what the configuration names is engine.config.optimizer.type",
    "register_comm_hook": "communication_data_type in the configuration is what gradients are sent in",
    "reload_states": _OFFLOAD,
    "scale": "gradients come by engine.backward(loss), which scales the loss",
    "set_train_micro_batch_size": "the configuration sets it. Forwards may have any number of samples",
    "set_requires_gradient_sync": "gradient_accumulation_steps in the configuration says how many micro-batches make an update",
    "set_lr": 'set group["lr"] of engine.optimizer.param_groups',
    "summon_full_params": _GATHERED,
    "tput_timer": "nothing counts samples per second. Drop the call",
    "train_batch": _PIPELINE,
    "unshard": _GATHERED,
    "zero_gather_16bit_weights_on_model_save": _WHOLE,
}

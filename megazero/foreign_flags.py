"""Flags of other trainers (Megatron-LM, DeepSpeed, nanoGPT) that are not settings here: accepted or refused, with the reason."""

from __future__ import annotations

_FP32_GRADIENTS = (
    "gradients are accumulated and reduced in fp32, unless --grad-dtype or --reduce-dtype sets another dtype"
)
_ALWAYS_LOGGED = "with --save, everything logged is also in DIR/metrics.jsonl and DIR/tensorboard"
_ATTENTION = (
    "attention is torch's scaled_dot_product_attention, which uses flash attention if the device supports it and only the "
    "causal mask is needed: not with --reset-attention-mask"
)
_NO_PIPELINES = "there are no pipelines; --model-parallel-size and --zero-stage 3 split what is too large"
_OWN_NORMS = "a script logs such numbers of its own by before_update (docs/own_scripts.md)"
_OWN_RATES = "a script gives parameter groups rates of their own by make_optimizer (docs/own_scripts.md)"
_ONE_ENGINE = "there is one implementation"
_UNSCALED = "softmax is in fp32 without it"
_NOT_FINITE = "a loss or gradient that is not finite is noticed in a collective that each step makes anyway"
_ONE_FORMAT = "checkpoints have one format, which any number of ranks reads"
_GARBAGE = "Python's garbage collector is left alone"

# Flags of Megatron-LM's first GPT-2 trainer and of later ones that ask for what always happens here. Accepted.
ALWAYS_SO = {
    "--lazy-loader": "data is always memory-mapped",
    "--loose-json": "a data file's kind is recognized by its name",
    "--shuffle": "samples are always shuffled, with --seed",
    "--resume-dataloader": "data order always continues exactly",
    "--fp32-allreduce": _FP32_GRADIENTS,
    "--fp32-layernorm": "normalization accumulates in fp32",
    "--accumulate-allreduce-grads-in-fp32": _FP32_GRADIENTS,
    "--attention-softmax-in-fp32": "softmax is in fp32",
    "--exit-signal-handler": "SIGTERM saves and exits",
    "--overlap-grad-reduce": "gradients are reduced while backward runs",
    "--override-lr-scheduler": "the flags always set the learning-rate schedule, even when a checkpoint is continued",
    "--override-opt-param-scheduler": "the flags always set the learning-rate schedule, even when a checkpoint is continued",
    "--override-opt_param-scheduler": "the flags always set the learning-rate schedule, even when a checkpoint is continued",
    "--use-cpu-initialization": "initial values are drawn on the CPU, the same for every model-parallel size",
    "--deepspeed-activation-checkpointing": "activation checkpointing has one implementation: --checkpoint-activations",
    "--zero-contigious-gradients": "a unit's gradients share one buffer",
    "--zero-reduce-scatter": "each rank receives only the gradients that it needs",
    "--deep-init": "output layers are always scaled by 1/sqrt(2 x layers), as GPT-2's are",
    "--use-flash-attn": _ATTENTION,
    "--use-mcore-models": _ONE_ENGINE,
    "--no-pipeline-parallel": "there are no pipelines",
    "--no-query-key-layer-scaling": _UNSCALED,
    "--no-create-attention-mask-in-dataloader": "attention kernels apply the causal mask themselves",
    "--log-throughput": _ALWAYS_LOGGED,
    "--log-timers-to-tensorboard": _ALWAYS_LOGGED,
    "--log-memory-to-tensorboard": _ALWAYS_LOGGED,
    "--log-validation-ppl-to-tensorboard": _ALWAYS_LOGGED,
    "--log-loss-scale-to-tensorboard": _ALWAYS_LOGGED,
    "--log-straggler": "the log names a rank that the others wait for",
    "--check-for-nan-in-loss-and-grad": _NOT_FINITE,
    "--use-dist-ckpt": _ONE_FORMAT,
    "--auto-detect-ckpt-format": _ONE_FORMAT,
    "--ckpt-fully-parallel-save": "every rank writes its own part of a checkpoint",
}

# Flags of the ZeRO-3 examples and of later Megatron-LM versions that tune what is done another way here, or its log. Accepted,
# and named in the log.
NO_EFFECT = {
    "--zero-allgather-bucket-size": "buffers are sized by the model's units",
    "--scattered-embeddings": "--sequence-parallel keeps a part of every sequence on each rank, embeddings included",
    "--split-transformers": "--recompute selective keeps less of a block without a second checkpoint in it",
    "--tensorboard-queue-size": "what a log line has is written at once",
    "--log-batch-size-to-tensorboard": "the log has the batch at the start",
    "--timing-log-level": "the same phases are always timed",
    "--timing-log-option": "times are the first rank's",
    "--log-world-size-to-tensorboard": "the log has the ranks at the start",
    "--log-progress": "the log has the run's tokens and FLOP at the start, and metrics.jsonl the samples so far",
    "--no-log-loss-scale-to-tensorboard": _ALWAYS_LOGGED,
    "--log-params-norm": _OWN_NORMS,
    "--log-num-zeros-in-grad": _OWN_NORMS,
    "--no-check-for-nan-in-loss-and-grad": _NOT_FINITE,
    "--empty-unused-memory-level": "memory that PyTorch's allocator has cached stays with it",
    "--no-async-tensor-model-parallel-allreduce": "the sums are the same, hidden behind other work or not",
    "--manual-gc": _GARBAGE,
    "--manual-gc-interval": _GARBAGE,
    **dict.fromkeys(
        (
            "--no-masked-softmax-fusion",
            "--no-bias-gelu-fusion",
            "--no-bias-swiglu-fusion",
            "--no-rope-fusion",
            "--no-bias-dropout-fusion",
            "--no-gradient-accumulation-fusion",
            "--no-persist-layer-norm",
            "--cross-entropy-loss-fusion",
        ),
        "no kernel of this project's own is fused; --compile fuses what it can",
    ),
}
WITH_VALUE = {  # the ones that take a value
    "--timing-log-option",
    "--empty-unused-memory-level",
    "--zero-allgather-bucket-size",
    "--tensorboard-queue-size",
    "--timing-log-level",
    "--manual-gc-interval",
}

_NOT_BUILT = "the model is GPT-2's, or Llama's by the flags that docs/training.md lists"
_ROPE = "use --position-embedding-type rope"
_NO_FP8 = "the smallest dtypes are --bf16 and --fp16"
_PROFILE = "use --profile-steps FIRST-LAST, which traces these iterations by torch.profiler"
_WARMUP = "use --lr-warmup-iters, or --warmup, a fraction of --lr-decay-iters"
_ITERATIONS = "runs are counted in iterations: --train-iters, --lr-decay-iters, --lr-warmup-iters"
_TRAIN_ITERS = "use --train-iters"
_LR = "use --lr"
_ACCUMULATION = "use --global-batch-size: what --batch-size on every rank does not give is accumulated"
_RECOMPUTED_TOGETHER = (
    "use --checkpoint-activations, with --checkpoint-num-layers for blocks that are recomputed together"
)

# Flags of the same trainers that mean nothing here, or something else. Refused, with advice on what to do.
REFUSED = {
    "--pretrained-bert": "BERT is not trained here",
    "--fp32-tokentypes": "token types belong to BERT",
    "--fp32-embedding": "parameters have one dtype; the optimizer's copy of every one of them is fp32",
    "--presplit-sentences": "sentences are BERT's; GPT-2 reads documents",
    "--max-preds-per-seq": "masked prediction belongs to BERT",
    "--eval-max-preds-per-seq": "masked prediction belongs to BERT",
    "--use-tfrecords": "use .bin/.idx from data_tools/preprocess_data.py, or JSON lines",
    "--use-npy-data-loader": "use .bin/.idx from data_tools/preprocess_data.py with --train-data",
    "--train-data-path": "use --train-data",
    "--val-data-path": "use --valid-data",
    "--test-data-path": "use --test-data",
    "--input-data-sizes-file": "sizes are in the .idx file",
    "--delim": "use JSON lines, one document a line",
    "--eval-text-key": "--text-key holds for every JSON file",
    "--tokenizer-model-type": "name the vocabulary's files: --vocab-file and --merge-file, or --tokenizer-path",
    "--eval-seq-length": "evaluations during training use --seq-length; evaluate_gpt2.py takes it",
    "--overlapping-eval": "it is a flag of evaluate_gpt2.py",
    "--temperature": "it is a flag of generate_samples.py",
    "--top_p": "it is a flag of generate_samples.py",
    "--top_k": "it is a flag of generate_samples.py",
    "--out-seq-length": "it is a flag of generate_samples.py",
    "--greedy": "generate_samples.py --temperature 0 always takes the likeliest token",
    "--cloze-eval": "use evaluate_gpt2.py --task lambada",
    "--eval-hf": "import the weights first: python -m megazero.checkpoint import --from huggingface",
    "--load-openai": "import the weights first: python -m megazero.checkpoint import --from huggingface",
    # Names of nanoGPT and of other trainers' for what has another name here.
    "--max_iters": _TRAIN_ITERS,
    "--max-steps": _TRAIN_ITERS,
    "--max_steps": _TRAIN_ITERS,
    "--epochs": f"{_TRAIN_ITERS}; the log says how many samples an epoch has",
    "--learning_rate": _LR,
    "--learning-rate": _LR,
    "--block_size": "use --seq-length, and --max-position-embeddings for the longest that the model reads",
    "--n_layer": "use --num-layers",
    "--n_head": "use --num-attention-heads",
    "--n_embd": "use --hidden-size",
    "--dropout": "use --hidden-dropout and --attention-dropout",
    "--gradient_accumulation_steps": _ACCUMULATION,
    "--gradient-accumulation-steps": _ACCUMULATION,
    "--grad_clip": "use --clip-grad",
    "--warmup_iters": "use --lr-warmup-iters",
    "--beta1": "use --adam-beta1",
    "--beta2": "use --adam-beta2",
    "--out_dir": "use --save, and --load to continue",
    "--init_from": "use --load to continue, or --pretrained-checkpoint",
    "--wandb_log": "use --wandb-project",
    "--dtype": "use --bf16 or --fp16; without them all is fp32",
    "--device": "GPUs are used if there are any; the variable CUDA_VISIBLE_DEVICES, if it is empty, hides them",
    "--config": "use --deepspeed_config for a JSON file with DeepSpeed's keys; flags in a file are given by $(cat FILE)",
    # Flags of Megatron-LM's later releases.
    "--pipeline-model-parallel-size": _NO_PIPELINES,
    "--num-layers-per-virtual-pipeline-stage": _NO_PIPELINES,
    "--context-parallel-size": "use --sequence-parallel, which cuts sequences over the --model-parallel-size ranks",
    "--expert-model-parallel-size": _NOT_BUILT,
    "--num-experts": _NOT_BUILT,
    "--use-rotary-position-embeddings": _ROPE,
    "--no-position-embedding": _ROPE,
    **dict.fromkeys(
        (
            "--rotary-percent",
            "--rotary-interleaved",
            "--rotary-seq-len-interpolation-factor",
            "--add-qkv-bias",
            "--qk-layernorm",
            "--window-size",
            "--apply-layernorm-1p",
        ),
        _NOT_BUILT,
    ),
    "--kv-channels": "heads are as wide as --hidden-size / --num-attention-heads",
    "--encoder-seq-length": "use --seq-length",
    "--lr-warmup-samples": _WARMUP,
    "--lr-warmup-tokens": _WARMUP,
    "--train-samples": _ITERATIONS,
    "--train-tokens": _ITERATIONS,
    "--lr-decay-samples": _ITERATIONS,
    "--lr-decay-tokens": _ITERATIONS,
    "--recompute-granularity": "use --recompute selective or --recompute full",
    "--recompute-activations": "use --recompute selective",
    "--recompute-method": _RECOMPUTED_TOGETHER,
    "--recompute-num-layers": _RECOMPUTED_TOGETHER,
    "--activations-checkpoint-method": _RECOMPUTED_TOGETHER,
    "--activations-checkpoint-num-layers": _RECOMPUTED_TOGETHER,
    "--use-distributed-optimizer": "use --zero-stage 1, which shards the optimizer's states over the data-parallel ranks",
    "--optimizer-cpu-offload": "use --offload-optimizer cpu",
    "--decoupled-lr": _OWN_RATES,
    "--decoupled-min-lr": _OWN_RATES,
    "--grad-reduce-in-bf16": "use --grad-dtype compute",
    "--DDP-impl": _ONE_ENGINE,
    "--transformer-impl": _ONE_ENGINE,
    "--apply-query-key-layer-scaling": _UNSCALED,
    "--attention-backend": _ATTENTION,
    "--weight-decay-incr-style": "weight decay stays what it is",
    "--ckpt-format": _ONE_FORMAT,
    "--fp8-format": _NO_FP8,
    "--fp8-hybrid": _NO_FP8,
    "--use-torch-fsdp2": "use --zero-stage 3",
    "--use-megatron-fsdp": "use --zero-stage 3",
    "--start-weight-decay": "weight decay stays what it is: use --weight-decay",
    "--end-weight-decay": "weight decay stays what it is: use --weight-decay",
    "--fp16-lm-cross-entropy": "the loss is always fp32",
    "--data-impl": "the kind of a data file is seen from its name",
    "--dataloader-type": "samples are always shuffled, by --seed",
    "--mock-data": "python -m data_tools sample_corpus makes a corpus to try things on",
    "--valid-data-path": "use --valid-data",
    "--full-validation": "give --eval-iters as many batches as the validation data has; the log counts its samples",
    "--multiple-validation-sets": "name the sets: --valid-data code=data/a web=data/b",
    "--tokenizer-model": "use --tokenizer-path",
    "--skip-train": "use evaluate_gpt2.py",
    "--non-persistent-save-interval": "use --save-interval with --keep-last, and --keep-every for those that stay",
    "--ckpt-step": "name the checkpoint itself: --load DIR/global_stepN",
    "--use-checkpoint-args": "give the flags that the checkpoint was trained with; what does not fit its weights is refused",
    "--use-checkpoint-lr-scheduler": "the learning-rate schedule is that of the flags",
    "--use-checkpoint-opt_param-scheduler": "the learning-rate schedule is that of the flags",
    "--distributed-timeout-minutes": "use --distributed-timeout-s",
    "--profile": _PROFILE,
    "--profile-step-start": _PROFILE,
    "--profile-step-end": _PROFILE,
    "--use-pytorch-profiler": _PROFILE,
    "--profile-ranks": "the first rank is traced",
    "--wandb-entity": "set the environment variable WANDB_ENTITY",
    "--wandb-save-dir": "the files lie in --save, or without it where the environment variable WANDB_DIR says",
    "--tensorboard-log-interval": "use --log-interval",
}

# Refused flags that are accepted with these values, which ask for what happens here anyway.
AS_IT_IS = {
    "--pipeline-model-parallel-size": ("1",),
    "--context-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
    "--rotary-percent": ("1.0", "1"),
    "--attention-backend": ("auto",),
    "--weight-decay-incr-style": ("constant",),
    "--DDP-impl": ("local", "torch"),
    "--transformer-impl": ("local",),
    "--data-impl": ("infer", "mmap"),
    "--dataloader-type": ("single",),
}

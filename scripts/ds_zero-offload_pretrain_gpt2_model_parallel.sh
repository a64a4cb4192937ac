#!/usr/bin/env bash
# ZeRO-Offload from a JSON file in DeepSpeed's keys, together with tensor parallelism: the optimizer's states are kept in host memory, and the
# update runs there. Small by default.
#   NPROC=4 bash scripts/ds_zero-offload_pretrain_gpt2_model_parallel.sh
# As in DeepSpeed's tutorial, on 16 GPUs of one node:
#   MODEL_PARALLEL_SIZE=4 NUM_LAYERS=4 HIDDEN_SIZE=1024 NUM_HEADS=16 SEQ_LENGTH=1024 BATCH_SIZE=12 TRAIN_ITERS=400 LOG_INTERVAL=5 LR=1.5e-4 \
#     TRAIN_DATA=webtext TOKENIZER_PATH=vocab/ bash scripts/ds_zero-offload_pretrain_gpt2_model_parallel.sh --fp16
SCRIPTS=$(dirname "$(readlink -f "$0")")
export MODEL_PARALLEL_SIZE=${MODEL_PARALLEL_SIZE:-2} DS_CONFIG=${DS_CONFIG:-$SCRIPTS/configs/ds_zero_offload.config}
exec bash "$SCRIPTS/ds_pretrain_gpt2.sh" --recompute "${RECOMPUTE:-full}" "$@"

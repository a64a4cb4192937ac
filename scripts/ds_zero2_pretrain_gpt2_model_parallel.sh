#!/usr/bin/env bash
# ZeRO stage 2 from a JSON file in DeepSpeed's keys, together with tensor parallelism: every layer is split over MODEL_PARALLEL_SIZE=2 ranks;
# optimizer states and gradients are sharded over the data-parallel ranks. Small by default.
#   NPROC=4 bash scripts/ds_zero2_pretrain_gpt2_model_parallel.sh
# As in DeepSpeed's tutorial, on 16 GPUs of one node:
#   MODEL_PARALLEL_SIZE=4 NUM_LAYERS=24 HIDDEN_SIZE=1024 NUM_HEADS=16 SEQ_LENGTH=1024 BATCH_SIZE=8 TRAIN_ITERS=100000 LR=1.5e-4 \
#     TRAIN_DATA=webtext TOKENIZER_PATH=vocab/ bash scripts/ds_zero2_pretrain_gpt2_model_parallel.sh --fp16
SCRIPTS=$(dirname "$(readlink -f "$0")")
export MODEL_PARALLEL_SIZE=${MODEL_PARALLEL_SIZE:-2} DS_CONFIG=${DS_CONFIG:-$SCRIPTS/configs/ds_zero_stage_2.config}
exec bash "$SCRIPTS/ds_pretrain_gpt2.sh" --recompute "${RECOMPUTE:-full}" "$@"

#!/usr/bin/env bash
# ZeRO-Offload of a model whose states do not fit on the GPU: in DeepSpeed's tutorial, 10 billion parameters (50 layers x 4096) on one GPU of
# 32 GB. Small by default; `python -m megazero.plan` shows what a larger model needs.
#   NPROC=1 bash scripts/ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh
# The 10B model, on a GPU of 32 GB with 200 GB of host memory:
#   NPROC=1 NUM_LAYERS=50 HIDDEN_SIZE=4096 NUM_HEADS=32 SEQ_LENGTH=1024 BATCH_SIZE=10 TRAIN_ITERS=100 LOG_INTERVAL=1 LR=1.5e-4 \
#     TRAIN_DATA=webtext TOKENIZER_PATH=vocab/ bash scripts/ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh --bf16
SCRIPTS=$(dirname "$(readlink -f "$0")")
export MODEL_PARALLEL_SIZE=${MODEL_PARALLEL_SIZE:-1} DS_CONFIG=${DS_CONFIG:-$SCRIPTS/configs/ds_zero_offload.config}
exec bash "$SCRIPTS/ds_pretrain_gpt2.sh" --recompute "${RECOMPUTE:-full}" "$@"

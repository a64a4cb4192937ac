#!/usr/bin/env bash
# Pretrains GPT-2 345M on webtext with data parallelism, on every GPU of this node. For more nodes, set NNODES, NODE_RANK, MASTER_ADDR.
#   TOKENIZER_PATH=vocab/ bash scripts/pretrain_gpt2_distributed.sh
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=6000 TOKENIZER_PATH=vocab/ bash scripts/pretrain_gpt2_distributed.sh
#   RECOMPUTE=none PRECISION=fp16 TOKENIZER_PATH=vocab/ bash scripts/pretrain_gpt2_distributed.sh
# RECOMPUTE is full (least memory), selective or none (fastest). PRECISION is bf16, fp16 or fp32; by default bf16, fp16 if the GPUs
# have no bf16, and fp32 without GPUs.
# Set PRECISION if nodes differ, and for a run that was started in another precision.
source "$(dirname "$(readlink -f "$0")")/common.sh"
use_python data "${JOB_PACKAGES[@]}"
tokenizer_args
precision_flag "$@"

SAVE=${SAVE:-checkpoints/gpt2_345m}
MODEL_ARGS=(
  --num-layers "${NUM_LAYERS:-24}" --hidden-size "${HIDDEN_SIZE:-1024}" --num-attention-heads "${NUM_HEADS:-16}"
  --seq-length "${SEQ_LENGTH:-1024}" --max-position-embeddings "${SEQ_LENGTH:-1024}"
  --recompute "${RECOMPUTE:-full}"
)
corpora "${TRAIN_DATA:-webtext}"
DATA_ARGS=(--train-data "${CORPORA[@]}" --split "${SPLIT:-949,50,1}" "${TOKENIZER_ARGS[@]}")
TRAIN_ARGS=(
  --model-parallel-size "${MODEL_PARALLEL_SIZE:-1}" --batch-size "${BATCH_SIZE:-8}" --train-iters "${TRAIN_ITERS:-320000}"
  --lr "${LR:-1.5e-4}" --lr-decay-style cosine --warmup .01 --weight-decay 1e-2 --clip-grad 1.0 ${PRECISION_FLAG:+"$PRECISION_FLAG"}
)
CHECKPOINT_ARGS=(--save "$SAVE" --load "${LOAD:-$SAVE}" --save-interval "${SAVE_INTERVAL:-5000}")

launch "$REPO/pretrain_gpt2.py" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAIN_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "$@"

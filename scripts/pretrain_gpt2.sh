#!/usr/bin/env bash
# Pretrains a small GPT-2 on real text, on every GPU of this machine or on 2 CPU ranks. If interrupted, run it again to resume.
#   bash scripts/pretrain_gpt2.sh
#   TRAIN_DATA=my_text_document TOKENIZER_TYPE=GPT2BPETokenizer TOKENIZER_PATH=vocab/ bash scripts/pretrain_gpt2.sh --bf16
# ZERO_STAGE and MODEL_PARALLEL_SIZE choose how the model is distributed over the ranks. A run can continue under other values: they are
# not part of the directory's name.
source "$(dirname "$(readlink -f "$0")")/common.sh"
use_python data "${JOB_PACKAGES[@]}"

if [ -n "${TRAIN_DATA:-}" ]; then tokenizer_args; else prepare_sample_data; fi
NUM_LAYERS=${NUM_LAYERS:-4} HIDDEN_SIZE=${HIDDEN_SIZE:-192}
corpora "$TRAIN_DATA"
# Each corpus or blend, and each size, is a run of its own, in its own directory. Corpora of one name lie in folders of other names.
NAMES=()
for CORPUS in "${CORPORA[@]}"; do
  NAME=${CORPUS##*/} NAME=${NAME%_document} NAME=${NAME%_text}
  FOLDER=${CORPUS%/*} FOLDER=${FOLDER##*/}
  [[ $CORPUS != */* || $NAME = "$FOLDER"* ]] || NAME=${FOLDER}_$NAME
  NAMES+=("$NAME")
done
SAVE=${SAVE:-checkpoints/gpt2_$(IFS=-; echo "${NAMES[*]}")_${NUM_LAYERS}x${HIDDEN_SIZE}}

MODEL_ARGS=(
  --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "${NUM_HEADS:-4}"
  --seq-length "${SEQ_LENGTH:-128}" --max-position-embeddings "${SEQ_LENGTH:-128}"
  --attention-dropout "${DROPOUT:-0.0}" --hidden-dropout "${DROPOUT:-0.0}"
)
DATA_ARGS=(--train-data "${CORPORA[@]}" --split "${SPLIT:-94,5,1}" --num-workers "${NUM_WORKERS:-0}" "${TOKENIZER_ARGS[@]}")
TRAIN_ARGS=(--train-iters "${TRAIN_ITERS:-800}" --eval-interval "${EVAL_INTERVAL:-100}" --eval-iters "${EVAL_ITERS:-20}")
read_json "$@"
# A JSON file overrides these defaults, but not a variable that is set.
json_has "train_micro_batch_size_per_gpu|train_batch_size" && [ -z "${BATCH_SIZE:-}" ] || TRAIN_ARGS+=(--batch-size "${BATCH_SIZE:-8}")
json_has optimizer && [ -z "${LR:-}" ] || TRAIN_ARGS+=(--lr "${LR:-3e-3}")
json_has optimizer || TRAIN_ARGS+=(--weight-decay 0.1)
json_has scheduler && [ -z "${WARMUP:-}" ] || TRAIN_ARGS+=(--lr-decay-style cosine --warmup "${WARMUP:-0.05}")
json_has steps_per_print && [ -z "${LOG_INTERVAL:-}" ] || TRAIN_ARGS+=(--log-interval "${LOG_INTERVAL:-25}")
CHECKPOINT_ARGS=(--save "$SAVE" --load "${LOAD:-$SAVE}" --save-interval "${SAVE_INTERVAL:-200}" --keep-last "${KEEP_LAST:-2}")
PARALLEL_ARGS=(--model-parallel-size "${MODEL_PARALLEL_SIZE:-1}" ${ZERO_STAGE:+--zero-stage "$ZERO_STAGE"})

launch "$REPO/pretrain_gpt2.py" "${PARALLEL_ARGS[@]}" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAIN_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "$@"

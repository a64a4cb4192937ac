#!/usr/bin/env bash
# Generates text from a checkpoint, on any number of tensor-parallel ranks, such as NPROC=2 MODEL_PARALLEL_SIZE=2 ...
#   LOAD=checkpoints/gpt2_sample_4x192 bash scripts/generate_text.sh --prompt "Returns the"
source "$(dirname "$(readlink -f "$0")")/common.sh"
use_python data "${JOB_PACKAGES[@]}"

NPROC=${NPROC:-${MODEL_PARALLEL_SIZE:-1}}
SAMPLE_ARGS=(--out-seq-length "${OUT_SEQ_LENGTH:-128}" --temperature "${TEMPERATURE:-0.9}" --top_k "${TOP_K:-0}" --top_p "${TOP_P:-0.0}")

launch "$REPO/generate_samples.py" --load "${LOAD:-checkpoints/gpt2_sample_4x192}" --model-parallel-size "${MODEL_PARALLEL_SIZE:-1}" "${SAMPLE_ARGS[@]}" "$@"

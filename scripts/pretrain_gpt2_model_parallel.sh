#!/usr/bin/env bash
# Pretrains GPT-2 345M on webtext with every layer split over MODEL_PARALLEL_SIZE=2 ranks; the other ranks are data-parallel.
#   TOKENIZER_PATH=vocab/ bash scripts/pretrain_gpt2_model_parallel.sh
export MODEL_PARALLEL_SIZE=${MODEL_PARALLEL_SIZE:-2} SAVE=${SAVE:-checkpoints/gpt2_345m_mp2}
exec bash "$(dirname "$(readlink -f "$0")")/pretrain_gpt2_distributed.sh" "$@"

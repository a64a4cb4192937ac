#!/usr/bin/env bash
# Runs scripts/pretrain_gpt2.sh under ZeRO stage 2: optimizer states and gradients are sharded over the data-parallel ranks.
#   bash scripts/pretrain_gpt2_zero2.sh
#   NPROC=4 MODEL_PARALLEL_SIZE=2 bash scripts/pretrain_gpt2_zero2.sh --bf16
export ZERO_STAGE=2
exec bash "$(dirname "$(readlink -f "$0")")/pretrain_gpt2.sh" "$@"

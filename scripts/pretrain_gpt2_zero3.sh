#!/usr/bin/env bash
# Runs scripts/pretrain_gpt2.sh under ZeRO stage 3: optimizer states, gradients and parameters are sharded over the data-parallel ranks. No rank
# ever has the whole model.
#   bash scripts/pretrain_gpt2_zero3.sh
#   NPROC=4 MODEL_PARALLEL_SIZE=2 bash scripts/pretrain_gpt2_zero3.sh --bf16
export ZERO_STAGE=3
exec bash "$(dirname "$(readlink -f "$0")")/pretrain_gpt2.sh" "$@"

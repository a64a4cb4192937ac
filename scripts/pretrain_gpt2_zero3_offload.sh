#!/usr/bin/env bash
# Runs scripts/pretrain_gpt2.sh under ZeRO stage 3 with all model states in host memory. Parameters come to the device a block at a time, and
# the optimizer runs on the CPU (ZeRO-Offload).
#   bash scripts/pretrain_gpt2_zero3_offload.sh
#   NPROC=4 bash scripts/pretrain_gpt2_zero3_offload.sh --bf16 --checkpoint-activations
export ZERO_STAGE=3
exec bash "$(dirname "$(readlink -f "$0")")/pretrain_gpt2.sh" --offload-optimizer cpu --offload-param cpu "$@"

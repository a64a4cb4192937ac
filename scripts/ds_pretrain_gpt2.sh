#!/usr/bin/env bash
# scripts/pretrain_gpt2.sh, whose flags leave the rest to a JSON file in DeepSpeed's keys: the ZeRO stage, fp16, ... Where both speak,
# the flag wins, and the log says so.
#   bash scripts/ds_pretrain_gpt2.sh
#   DS_CONFIG=scripts/configs/ds_zero_stage_3.config bash scripts/ds_pretrain_gpt2.sh --bf16
exec bash "$(dirname "$0")/pretrain_gpt2.sh" --deepspeed --deepspeed_config "${DS_CONFIG:-scripts/configs/ds_zero_stage_1.config}" "$@"

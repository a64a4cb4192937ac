#!/usr/bin/env bash
# Runs scripts/pretrain_gpt2.sh with a JSON file in DeepSpeed's keys: ZeRO stage, fp16, optimizer, schedule, batch size, ... The file overrides
# that script's defaults. A flag or variable that you set overrides the file, and the log says so.
#   bash scripts/ds_pretrain_gpt2.sh
#   DS_CONFIG=scripts/configs/ds_zero_stage_3.config bash scripts/ds_pretrain_gpt2.sh --bf16
SCRIPTS=$(dirname "$(readlink -f "$0")")
exec bash "$SCRIPTS/pretrain_gpt2.sh" --deepspeed --deepspeed_config "${DS_CONFIG:-$SCRIPTS/configs/ds_zero_stage_1.config}" "$@"

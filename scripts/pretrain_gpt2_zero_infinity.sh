#!/usr/bin/env bash
# Runs scripts/pretrain_gpt2.sh under ZeRO stage 3 with all model states in one file per rank in NVME_PATH (ZeRO-Infinity). The directory should
# be on an NVMe drive of the node; nothing is left behind there.
#   NVME_PATH=/local_nvme bash scripts/pretrain_gpt2_zero_infinity.sh --bf16
export ZERO_STAGE=3
NVME_PATH=${NVME_PATH:-${TMPDIR:-/tmp}}
mkdir -p "$NVME_PATH"
exec bash "$(dirname "$(readlink -f "$0")")/pretrain_gpt2.sh" --offload-optimizer nvme --offload-param nvme --nvme-path "$NVME_PATH" "$@"

#!/usr/bin/env bash
# Run this on each machine, and again on a machine that failed. The machine at HEAD hosts the
# rendezvous.
#   HEAD=10.0.0.1 FOLDER=/shared/run bash examples/multi_node/launch.sh --steps 1000
set -euo pipefail

# Set explicitly, because torchrun would use the host name, which may resolve to another network.
mine=$(hostname -I)
head=$(getent ahostsv4 "$HEAD" | awk 'NR == 1 { print $1 }' || true)
[[ " $mine" == *" $head "* || $head == 127.* ]] && is_host=1 || is_host=0

# torchrun's store keeps the addresses of previous ranks, for which new ranks would wait forever.
# With this variable, each start creates a new store on its first rank.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
waits="last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"

exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NODES:-1:2}" \
  --nproc-per-node "${RANKS_A_NODE:-2}" \
  --local-addr "${ADDRESS:-${mine%% *}}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD:${PORT:-29400}" \
  --rdzv-id "${RUN:-shardgrad}" \
  --rdzv-conf "is_host=${IS_HOST:-$is_host},$waits" \
  --max-restarts 100 \
  "$(dirname "$0")/train.py" --folder "$FOLDER" "$@"

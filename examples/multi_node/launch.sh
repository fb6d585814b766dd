#!/usr/bin/env bash
# Run this on each machine; it may be started again on one that was lost. The machine at HEAD meets the others.
#   HEAD=10.0.0.1 FOLDER=/shared/run bash examples/multi_node/launch.sh --steps 1000
set -euo pipefail

# Said outright, since torchrun would go by the host's name, which may stand for another network.
mine=$(hostname -I)
head=$(getent ahostsv4 "$HEAD" | awk 'NR == 1 { print $1 }' || true)
[[ " $mine" == *" $head "* ]] && is_host=1 || is_host=0

# torchrun's own store outlives ranks, and with it the addresses of those that are gone: the next ones would wait
# for them for ever. With this they meet in a new store each time, which the first of them hosts.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NODES:-1:2}" \
  --nproc-per-node "${RANKS_A_NODE:-2}" \
  --local-addr "${ADDRESS:-${mine%% *}}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD:${PORT:-29400}" \
  --rdzv-id "${RUN:-shardgrad}" \
  --rdzv-conf "is_host=${IS_HOST:-$is_host},last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3" \
  --max-restarts 100 \
  "$(dirname "$0")/train.py" --folder "$FOLDER" "$@"

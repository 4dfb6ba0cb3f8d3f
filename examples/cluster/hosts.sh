#!/bin/sh
# The same command on every host, each with its own NODE (0, 1, ...). All see DATA and OUT on a shared
# disk; FIRST is the address of node 0. Parquet files of DATA are divided over the processes.
set -eu
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="${NODES:-1}" --node-rank="${NODE:-0}" --nproc-per-node="${PROCESSES:-2}" \
    --rdzv-backend=c10d --rdzv-endpoint="${FIRST:-localhost:29500}" --rdzv-id="${RUN:-dpkfc}" \
    --max-restarts=3 \
    -m dpkfc train --data "$DATA" --schema "$SCHEMA" --epsilon 3 --out "$OUT" "$@"

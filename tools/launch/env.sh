# Sourced by router.sh, prefill.sh and decode.sh: checks CONFIG and NODE, finds kvkin, sets up UCX.
# shellcheck shell=bash

: "${CONFIG:?set CONFIG to the cluster file, the same on every host}"
: "${NODE:?set NODE to the name of this node in the cluster file}"

# kvkin: $KVKIN, else the checkout's own installation, else whatever is on the path
if [[ -z ${KVKIN:-} ]]; then
    KVKIN="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv/bin/kvkin"
    [[ -x $KVKIN ]] || KVKIN=kvkin
fi

# UCX picks shared memory within a host and the fastest network between hosts by itself. Where a host has several networks,
# or the wrong one is picked, uncomment:
# export UCX_NET_DEVICES=mlx5_0:1          # the InfiniBand or RoCE port (`ibv_devices` lists them)
# export UCX_TLS=rc,sm,self                # reliable verbs + shared memory (KV lies in host memory)
# export UCX_IB_GID_INDEX=3                # RoCE v2 with several GIDs
# export UCX_LOG_LEVEL=info                # says which transports were chosen

# RDMA registers the KV memory, so it must be lockable; a router has none
if [[ ${0##*/} != router.sh && $(ulimit -l) != unlimited ]]; then
    echo "warning: ulimit -l is $(ulimit -l) KiB; RDMA needs 'unlimited' to register the KV memory" >&2
fi

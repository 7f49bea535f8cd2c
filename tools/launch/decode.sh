#!/usr/bin/env bash
# Start a decode node on this host and serve until SIGTERM:
#   CONFIG=/etc/kvkin/cluster.yaml NODE=decode-qa tools/launch/decode.sh
# It needs the checkpoint and adapters of its models, and host memory of kv_bytes + e_bytes besides the weights.
set -euo pipefail
# shellcheck source=tools/launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$KVKIN" decode --config "$CONFIG" --node "$NODE" "$@"

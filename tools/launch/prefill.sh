#!/usr/bin/env bash
# Start a prefill node on this host and serve until SIGTERM:
#   CONFIG=/etc/kvkin/cluster.yaml NODE=prefill-0 tools/launch/prefill.sh
# It needs the checkpoint of its models, and host memory of kv_bytes + e_bytes besides the weights.
set -euo pipefail
# shellcheck source=tools/launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$KVKIN" prefill --config "$CONFIG" --node "$NODE" "$@"

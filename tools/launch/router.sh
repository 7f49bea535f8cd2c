#!/usr/bin/env bash
# Start the router on this host and serve until SIGTERM:
#   CONFIG=/etc/kvkin/cluster.yaml NODE=router-0 tools/launch/router.sh
# Clients reach it at its client_port, nodes at its node_port.
set -euo pipefail
# shellcheck source=tools/launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$KVKIN" router --config "$CONFIG" --node "$NODE" "$@"

"""The failures that meet a pull, on the data plane of networks without RDMA: the same tests over plain sockets."""

from __future__ import annotations

import pytest
from cluster.test_failures import (
    test_consumer_killed_while_it_pulls_leaves_no_lease,
    test_prefill_node_killed_while_a_live_order_is_pulled,
    test_sender_that_holds_another_agents_context_is_killed,
    test_two_nodes_frozen_at_once,
)

BACKEND = "tcp"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("unharmed")]

__all__ = [
    "test_consumer_killed_while_it_pulls_leaves_no_lease",
    "test_prefill_node_killed_while_a_live_order_is_pulled",
    "test_sender_that_holds_another_agents_context_is_killed",
    "test_two_nodes_frozen_at_once",
]

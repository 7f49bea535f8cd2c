"""Chooses node and reuse plan of a request: pure, called once a request by the router process (DESIGN.md section 5)."""

from __future__ import annotations

from collections.abc import Sequence

from kvkin.router.index import Match
from kvkin.router.policy_types import (
    ClusterView,
    Considered,
    Decision,
    FamilyView,
    GroupChoice,
    NodeView,
    OrderRequest,
    PolicyRequest,
    PolicySettings,
)

__all__ = [
    "ClusterView",
    "Considered",
    "Decision",
    "FamilyView",
    "GroupChoice",
    "NodeView",
    "OrderRequest",
    "PolicyRequest",
    "PolicySettings",
    "choose",
]


def choose(
    request: PolicyRequest, matches: Sequence[Match], view: ClusterView, settings: PolicySettings = PolicySettings()
) -> Decision:
    """The best plan within the request's quality bound. Raises NodeUnavailable if no decode node can run the model."""
    raise NotImplementedError

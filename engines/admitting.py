"""What every engine checks before it takes a request."""

from __future__ import annotations

from collections.abc import Collection

from kvkin.engines.api import EngineRequest
from kvkin.kv.errors import InvalidRequest
from kvkin.kv.execution import PlanExecution
from kvkin.kv.plan import ReusePlan


def execution_of(
    plan: ReusePlan, model: str, models: Collection[str], num_layers: int, chunk_tokens: int
) -> PlanExecution:
    """A fresh execution of ``plan``. Raises InvalidRequest, also if ``model`` is none of the engine's ``models``."""
    if model not in models:
        raise InvalidRequest(f"model {model!r} is not on this node (allowed: {', '.join(models)})")
    try:
        return PlanExecution(plan, num_layers, chunk_tokens)
    except ValueError as error:
        raise InvalidRequest(f"plan: {error}") from None


def check_covered(request: EngineRequest, planned: PlanExecution) -> None:
    """Raise InvalidRequest unless the plan is one for the request's tokens."""
    if planned.plan.num_tokens != len(request.token_ids):
        raise InvalidRequest(f"plan covers {planned.plan.num_tokens} of {len(request.token_ids)} tokens")

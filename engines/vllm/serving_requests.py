"""A request of a plain ``vllm serve`` as the scheduler side knows it (``serving_side.py``): who takes part, what it allows, what becomes of it.

``request`` is vLLM's own (v1/request.py); it is read here, never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvkin.engines.vllm.entries import PARAMETER, Entry
from kvkin.engines.vllm.loads import Load, LoadState
from kvkin.engines.vllm.orders import HoldAdapter
from kvkin.engines.vllm.serving import Wishes, wishes_of
from kvkin.engines.vllm.spaces import Coverage
from kvkin.kv.execution import Unit
from kvkin.kv.plan import ReusePlan


@dataclass
class Asked:
    """A request that the family may know something of. ``plan``: what is executed, once it is known; ``salt``: what approximate KV of it is
    found by; ``holding``: units wait until all ranks have its adapter. Is its load's ``Listener``."""

    request: Any
    model: str
    wishes: Wishes
    deadline: float
    fail: Callable[[Asked, str], None]
    plan: ReusePlan | None = None
    salt: str | None = None
    entry: Entry | None = None
    publishable: bool = False
    answered: bool = False
    holding: bool = False
    failing: bool = False
    prefilled: bool = False
    fallback: str = ""
    covered: Coverage = field(default_factory=Coverage)

    @property
    def key(self) -> str:
        key: str = self.request.request_id
        return key

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def tokens_reused(self) -> int:
        """Prompt tokens whose KV came from others, in whole or in part; those that vLLM had itself are not among them."""
        load = None if self.entry is None else self.entry.load
        return 0 if load is None or load.state is not LoadState.DONE else max(0, load.stop - load.cached)

    @property
    def said(self) -> dict[str, Any] | None:
        """What a client is told of its request at the end (``kv_transfer_params`` of the answer)."""
        if self.plan is None:
            return None
        return told(self.plan, self.tokens_reused, self.fallback)

    def load(self, plan: ReusePlan, num_layers: int, chunk_tokens: int) -> Load:
        """What is to be loaded under a plan."""
        lora = self.request.lora_request
        lora_id = 0 if lora is None else lora.lora_int_id
        return Load(self.key, plan, self.request.prompt_token_ids, lora_id, num_layers, chunk_tokens)

    def hold(self, ticket: int) -> HoldAdapter:
        """The order to have its adapter ready for units."""
        lora = self.request.lora_request
        return HoldAdapter(ticket, self.key, lora.lora_int_id, lora.lora_name, lora.lora_path)

    def lost(self, states: bool) -> None:
        """vLLM gave blocks of it to others; with ``states`` its hidden states are gone, too."""
        if states:
            self.covered.forget()

    # --- from the workers ----------------------------------------------------------------------------------------------------

    def unit_done(self, unit: Unit, positions: object, seconds: float) -> None:
        """The load's own table follows its units."""

    def states_kept(self, layer: int, start: int, stop: int) -> None:
        self.covered.add(layer, start, stop)

    def load_failed(self, why: str) -> None:
        self.fail(self, why)

    def step_wasted(self, why: str) -> None:
        """Loads of servers are never ended early, so no forward waits for one."""

    def load_lost(self, why: str) -> None:
        self.fail(self, why)


def told(plan: ReusePlan, tokens_reused: int = 0, fallback: str = "") -> dict[str, Any]:
    """``kv_transfer_params`` of an answer: what was executed."""
    said = {"plan": str(plan.kind), "tokens_reused": tokens_reused, "reason": plan.reason}
    return {PARAMETER: said | ({"fallback": fallback} if fallback else {})}


def adapter_of(request: Any) -> tuple[str, str] | None:
    """(name, path) of the LoRA adapter that it asks for; None: the base model."""
    lora = request.lora_request
    return None if lora is None else (lora.lora_name, lora.lora_path)


def is_plain(request: Any) -> bool:
    """Whether the request's KV is that of its token ids alone, and vLLM may reuse any. One with a salt of its own is to share nothing."""
    return (
        request.sampling_params is not None
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
        and not request.skip_reading_prefix_cache
        and request.cache_salt is None
    )


def wishes_in(request: Any, default: Wishes) -> Wishes:
    """What the request allows. Raises ConfigError if it cannot be read."""
    parameters = request.kv_transfer_params
    if not isinstance(parameters, dict) or PARAMETER not in parameters:
        return default
    return wishes_of(parameters[PARAMETER], default, f"kv_transfer_params.{PARAMETER}")


def computed_tokens(request: Any) -> tuple[int, ...]:
    """Its tokens whose KV is in vLLM's cache by now."""
    count = min(request.num_computed_tokens, request.num_tokens)
    return tuple(request.all_token_ids[:count])

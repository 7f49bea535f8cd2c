"""The scheduler side of kvkin's connector: what vLLM's scheduler is told of loads, and which orders go to the workers.

Runs where vLLM's scheduler runs; the engine enters its requests here before it hands them to vLLM. vLLM keeps the blocks of a load,
and of a finished request that somebody still reads, until the worker side reports them: an id that is reported twice, or never, ends
vLLM or leaks. So each request is in one table here, and each report is ordered in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from kvkin.engines.vllm.loads import Load, LoadState, LoadTable
from kvkin.engines.vllm.orders import Forget, Order, Progress, ReleaseBlocks, SwapOut

PARAMETER = "kvkin"
"""Key in a request's ``kv_transfer_params``: the name under which the engine entered it."""


@dataclass
class Entry:
    """One request. ``lost`` is called when blocks that somebody may read are gone; ``tapped`` if E is kept, ``hold`` if its blocks
    are to be kept at the end."""

    load: Load
    num_tokens: int
    max_new_tokens: int
    lost: Callable[[], None]
    tapped: bool = False
    hold: bool = True
    request_id: str = ""
    held: tuple[int, ...] | None = None
    scheduled: bool = False
    waits_for_data: bool = False
    cached_tokens: int = 0
    ended: bool = False


@dataclass
class StepPlan:
    """What one step's orders are, and how much vLLM itself computes in it."""

    orders: list[Order] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)


class SchedulerSide:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.entries: dict[str, Entry] = {}
        self._by_id: dict[str, Entry] = {}
        self._held: dict[str, Entry] = {}  # finished, blocks kept; oldest first
        self._orders: list[Order] = []  # for the next step, before its slices
        self._manager: Any = None
        self.loads: LoadTable | None = None
        self.active = False
        """Whether the last step had anything to do."""
        self.last = StepPlan()

    def configure(self, chunk_tokens: int, num_layers: int) -> None:
        assert self.loads is None or not len(self.loads)
        self.loads = LoadTable(chunk_tokens, num_layers)

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    # --- from the engine ---------------------------------------------------------------------------------------------------

    def enter(self, key: str, entry: Entry) -> None:
        self.entries[key] = entry

    def blocks(self, key: str) -> Sequence[int]:
        """The request's blocks as they are now. Raises RuntimeError once they are gone."""
        entry = self.entries.get(key)
        if entry is not None and entry.held is not None:
            return entry.held
        if entry is None or not entry.request_id or entry.ended:
            raise RuntimeError("the blocks of this request were given back")
        (ids,) = self._manager.get_block_ids(entry.request_id)
        return list(ids)

    def left(self, entry: Entry) -> None:
        """The engine has given up a request; vLLM may never have heard of it."""
        if not entry.ended:
            self._drop(entry.load.key, entry)

    def release(self, key: str) -> None:
        """Give back the blocks of a finished request, or have them given back at its end. Idempotent."""
        entry = self.entries.get(key)
        if entry is None:
            return
        entry.hold = False
        if entry.held is not None:
            entry.held = None
            del self._held[key]
            self._orders.append(ReleaseBlocks(entry.request_id))
            self._drop(key, entry)

    def release_all(self) -> None:
        """Give back everything that is kept for readers: the engine is closing."""
        self._take_back(len(self._held))

    def free_blocks(self) -> int:
        free: int = self._manager.block_pool.get_num_free_blocks()
        return free

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def frees_blocks(self) -> bool:
        """Before vLLM preempts a request: blocks that are only kept for readers go first. True: some will be free soon."""
        if self._held and not self._orders:
            self._take_back(1)
        return self.has_orders

    # --- from vLLM's scheduler -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        entry = self._entry_of(request)
        if entry is not None:
            entry.request_id = request.request_id
            self._by_id[request.request_id] = entry

    def matched_tokens(self, request: Any, cached: int) -> tuple[int | None, bool]:
        """Tokens after vLLM's own ``cached`` ones that come by a load; None: ask again. May be asked often: changes nothing."""
        entry = self._by_id.get(request.request_id)
        if entry is None or not entry.load.stop:
            return 0, False
        load = entry.load
        entry.waits_for_data = False
        if load.state is LoadState.DONE and not load.swapped:
            return 0, False
        if load.stop <= cached:
            # the node adopts what it pulls as blocks once the prompt is done: it must be complete by then
            entry.waits_for_data = not (load.swapped or load.all_arrived)
            return (None, False) if entry.waits_for_data else (0, False)
        return load.stop - cached, True

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        entry = self._by_id.get(request.request_id)
        if entry is None:
            return
        (ids,) = blocks.get_block_ids()
        if num_external > 0:
            assert self.loads is not None
            self._orders += entry.load.allocated(ids, entry.load.stop - num_external)
            if not entry.load.swapped:
                entry.cached_tokens = entry.load.cached
            self.loads.add(entry.load, request.request_id)
        elif entry.load.state is LoadState.QUEUED:
            entry.load.covered(ids)
        entry.scheduled = True

    def plan_step(self, output: Any) -> StepPlan:
        """The orders of the step that vLLM is about to run."""
        orders = self._preempted(output)
        orders += self._orders
        self._orders = []
        assert self.loads is not None or not self._by_id
        slices = self.loads.orders() if self.loads is not None else []
        step = StepPlan([*orders, *slices], self._progress(output))
        self.last = step
        self.active = bool(output.total_num_scheduled_tokens or step.orders)
        self._make_room()
        return step

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        """A request has ended, well or not; True: its blocks stay until they are reported as sent."""
        entry = self._by_id.pop(request.request_id, None)
        if entry is None:
            return False
        entry.ended = True
        key = entry.load.key
        if entry.load.state is LoadState.LOADING:
            # vLLM keeps the blocks until the load is reported; nothing is written after this order
            assert self.loads is not None
            self.loads.remove(entry.load)
            self._orders.append(entry.load.end(request.request_id))
            self._drop(key, entry)
            return False
        if entry.hold and request.status != RequestStatus.FINISHED_ERROR and block_ids[0]:
            entry.held = tuple(block_ids[0])
            self._held[key] = entry
            return True
        self._drop(key, entry)
        return False

    def received(self, request_ids: set[str]) -> None:
        """vLLM took the reports of these loads."""
        for request_id in request_ids:
            entry = self._by_id.get(request_id)
            if entry is not None:
                entry.load.state = LoadState.DONE

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _entry_of(self, request: Any) -> Entry | None:
        parameters = request.kv_transfer_params
        return self.entries.get(parameters.get(PARAMETER, "")) if parameters else None

    def _drop(self, key: str, entry: Entry) -> None:
        self.entries.pop(key, None)
        if entry.load.swapped:
            self._orders.append(Forget(key))

    def _preempted(self, output: Any) -> list[Order]:
        """vLLM takes running requests' blocks: their loads are kept in host memory first, so that the plan's answer stays the plan's."""
        orders: list[Order] = []
        for request_id in output.preempted_req_ids or ():
            entry = self._by_id.get(request_id)
            if entry is None:
                continue
            entry.lost()
            entry.scheduled = False
            load = entry.load
            if load.stop and load.state is LoadState.DONE and not load.swapped:
                load.swapped = True
                orders.append(SwapOut(load.key, load.block_ids, load.stop))
        if output.preempted_req_ids:
            self._take_back(len(self._held))
        return orders

    def _progress(self, output: Any) -> list[Progress]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        progress = []
        for request_id, count in output.num_scheduled_tokens.items():
            entry = self._by_id.get(request_id)
            if entry is None:
                continue
            start = computed[request_id]
            slot = -1
            if entry.tapped:
                block = self.blocks(entry.load.key)[start // self._block_size]
                slot = block * self._block_size + start % self._block_size
            progress.append(Progress(entry.load.key, start, start + count, slot))
        return progress

    def _make_room(self) -> None:
        """Blocks that are only kept for readers go back, oldest first, when a request cannot start for want of them."""
        for entry in self._by_id.values():
            if entry.scheduled or entry.waits_for_data:
                continue
            needed = -(-(entry.num_tokens + entry.max_new_tokens) // self._block_size)
            if self._held and self.free_blocks() < needed:
                self._take_back(1)
            return

    def _take_back(self, count: int) -> None:
        for key in list(self._held)[:count]:
            self._held[key].lost()
            self.release(key)
            self.active = True

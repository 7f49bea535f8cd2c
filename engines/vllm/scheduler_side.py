"""The scheduler side of kvkin's connector: what vLLM's scheduler is told of loads, and which orders go to the workers.

Runs where vLLM's scheduler runs; the engine enters its requests here before it hands them to vLLM. vLLM keeps the blocks of a load,
and of a finished request that somebody still reads, until the worker side reports them: an id that is reported twice, or never, ends
vLLM or leaks. So each request is in one table here, and each report is ordered in one place. What the workers say is heard here, too
(``reports.py``), and told to whoever listens to the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from kvkin.engines.vllm.budgets import HostMemory
from kvkin.engines.vllm.entries import PARAMETER, Entry, StepPlan, computed_before, tell
from kvkin.engines.vllm.loads import Load, LoadState, LoadTable
from kvkin.engines.vllm.orders import EndLoad, Forget, Order, Progress, ReleaseBlocks, Serve, Store, SwapOut, is_slice
from kvkin.engines.vllm.reports import LoadFailed, RankReports, Report, SliceTook, StatesKept, Stored, UnitRan

MAX_SLICES_OUT = 2
"""Slices that were ordered and are not done: one that the device works on, one behind it. More would wait there instead of here."""


class SchedulerSide:
    """``num_ranks`` workers carry out the orders."""

    def __init__(self, block_size: int, num_ranks: int = 1) -> None:
        self._block_size, self._ranks = block_size, RankReports(num_ranks)
        self.entries: dict[str, Entry] = {}
        self._by_id: dict[str, Entry] = {}
        self._held: dict[str, Entry] = {}  # finished, blocks kept; oldest first
        self._orders: list[Order] = []  # for the next step, before its slices
        self._stores: dict[int, Callable[[str], None]] = {}
        self._manager: Any = None
        self.loads: LoadTable | None = None
        self.active = False
        """Whether the last step had anything to do, or something came of earlier ones."""
        self.slice_s = 0.0
        """Seconds that the last step took longer because of slices."""
        self._slices_out = 0
        self.last = StepPlan()
        self.ends_early: Callable[[Load], bool] = lambda load: False
        """Whether a load that only pulls may be waited for by a forward; asked only if its request is alone."""
        self._token_bytes = 0
        self.states, self.swaps = HostMemory(), HostMemory()

    def configure(
        self,
        chunk_tokens: int,
        num_layers: int,
        token_bytes: int = 0,
        *,
        states_bytes: int | None = None,
        swap_bytes: int | None = None,
    ) -> None:
        """Before the first request. ``token_bytes`` are those of a token's KV in all layers; the others bound host memory."""
        assert self.loads is None or not len(self.loads)
        self.loads = LoadTable(chunk_tokens, num_layers)
        self._token_bytes = token_bytes
        self.states, self.swaps = HostMemory(states_bytes), HostMemory(swap_bytes)

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    # --- from the engine ---------------------------------------------------------------------------------------------------

    def enter(self, entry: Entry, serve: Serve) -> None:
        """A request that vLLM will get under its load's key; the workers hear of it with the next step."""
        self.entries[serve.key] = entry
        self._orders.append(serve)

    def store(self, order: Store, done: Callable[[str], None]) -> None:
        """Have blocks stored before the next step runs; ``done`` hears why it failed, or nothing. Tickets are the caller's."""
        assert order.ticket not in self._stores
        self._stores[order.ticket] = done
        self._orders.append(order)

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
        """Whether steps are wanted although vLLM has no request."""
        return bool(self._orders or self._stores)

    def frees_blocks(self) -> bool:
        """Before vLLM preempts a request: blocks that are only kept for readers go first. True: some will be free soon."""
        if self._held and not self._gives_back:
            self._take_back(1)
        return self._gives_back

    @property
    def _gives_back(self) -> bool:
        return any(isinstance(order, ReleaseBlocks | EndLoad) for order in self._orders)

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
        # nobody else waits with it, or finds its blocks in vLLM's cache before they are complete
        alone = len(self._by_id) == 1
        slices: list[Order] = []
        if self.loads is not None and self._slices_out < MAX_SLICES_OUT:
            slices = self.loads.orders(self.ends_early if alone else lambda load: False)
        step = StepPlan([*orders, *slices], self._progress(output), idle=not output.total_num_scheduled_tokens)
        self.last = step
        self.slice_s = 0.0
        self._slices_out += is_slice(step.orders)
        self.active = bool(step.orders) or not step.idle
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
        if entry.load.state is LoadState.ENDED:
            # vLLM waits for the report that is on its way, and takes its blocks back by itself
            self._drop(key, entry)
            return False
        if entry.hold and request.status != RequestStatus.FINISHED_ERROR and block_ids[0]:
            entry.held = tuple(block_ids[0])
            self._held[key] = entry
            return True
        self._drop(key, entry)
        return False

    def received(self, request_ids: set[str]) -> None:
        """vLLM took the reports of these loads: its next step has something to do."""
        self.active = self.active or bool(request_ids)
        for request_id in request_ids:
            entry = self._by_id.get(request_id)
            if entry is not None:
                entry.load.state = LoadState.DONE

    # --- from the workers ----------------------------------------------------------------------------------------------------

    def step_reported(self, by_rank: Sequence[Sequence[Report]]) -> None:
        """The reports of a step, of workers in other processes."""
        for report in self._ranks.add([list(filter(self._concerns, reports)) for reports in by_rank]):
            self.reported(report)

    def _concerns(self, report: Report) -> bool:
        """Whether a report is not one of a request that is gone: some ranks may have said their part before it went."""
        return isinstance(report, Stored | SliceTook) or report.key in self.entries

    def reported(self, report: Report) -> None:
        """Late reports of requests that are gone are ignored."""
        self.active = True
        match report:
            case SliceTook():
                self.slice_s += report.step_s
                self._slices_out -= 1
            case Stored(ticket, why):
                self._stores.pop(ticket, _ignore)(why)
            case LoadFailed(_, why, late=True):
                self._waste_step(why)
            case UnitRan(key) | StatesKept(key) | LoadFailed(key):
                entry = self.entries.get(key)
                if entry is not None and entry.listener is not None:
                    tell(entry.listener, report)

    def _waste_step(self, why: str) -> None:
        """Nothing of the step that runs is to be used, and nobody may find its blocks in vLLM's cache: also who came only now."""
        for progress in self.last.progress:
            entry = self.entries.get(progress.key)
            if entry is not None:
                self._manager.evict_blocks(set(self.blocks(progress.key)))
                if entry.listener is not None:
                    entry.listener.step_wasted(why)

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _entry_of(self, request: Any) -> Entry | None:
        parameters = request.kv_transfer_params
        return self.entries.get(parameters.get(PARAMETER, "")) if parameters else None

    def _drop(self, key: str, entry: Entry) -> None:
        self.states.give(key)
        self.swaps.give(key)
        if self.entries.pop(key, None) is not None:
            self._ranks.forget(key)
            self._orders.append(Forget(key))

    def _preempted(self, output: Any) -> list[Order]:
        """vLLM takes running requests' blocks: their loads are kept in host memory first, so that the plan's answer stays the plan's."""
        orders: list[Order] = []
        for request_id in output.preempted_req_ids or ():
            entry = self._by_id.get(request_id)
            if entry is None:
                continue
            entry.lost(False)
            entry.scheduled = False
            load = entry.load
            if load.stop and load.state is LoadState.DONE and not load.swapped:
                load.swapped = self.swaps.take(load.key, load.stop * self._token_bytes)
                if load.swapped:
                    orders.append(SwapOut(load.key, load.block_ids, load.stop))
                elif entry.listener is not None:
                    entry.listener.load_lost("no room for the KV of a request that had to give way to others")
        if output.preempted_req_ids:
            self._take_back(len(self._held))
        return orders

    def _progress(self, output: Any) -> list[Progress]:
        computed = computed_before(output)
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
            self._held[key].lost(True)
            self.release(key)
            self.active = True


def _ignore(_: str) -> None:
    pass

"""The worker side of kvkin's connector: carries out the scheduler side's orders between two forwards, and watches each forward.

Runs in the process and on the thread that runs the model, on every rank. Orders are executed from the first to the last, nothing is
decided here (``orders.py``). What it has to say goes to ``report``: with the scheduler side in the same process that is heard at once,
else the reports of a step go back with its output (``reports.py``). On a device what was ordered is done later than the call that ordered it:
nothing is said, and no load is received, before it is (``lanes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from kvkin.engines.vllm.cuda_lane import lane_for
from kvkin.engines.vllm.first_logits import taken as first_distribution_of
from kvkin.engines.vllm.forward_watch import ForwardWatch
from kvkin.engines.vllm.layers import LayerRunner
from kvkin.engines.vllm.load_work import Loading, LoadWork, Served, reason
from kvkin.engines.vllm.models import built_model
from kvkin.engines.vllm.orders import (
    BeginLoad,
    Bytes,
    EndLoad,
    Forget,
    HoldAdapter,
    Order,
    Progress,
    ReleaseBlocks,
    RunUnit,
    Serve,
    StoreE,
    StoreKV,
    SwapIn,
    SwapOut,
    WriteData,
    is_slice,
)
from kvkin.engines.vllm.rank_memory import CacheShape, KeptStates, RankMemory
from kvkin.engines.vllm.reports import Report, SliceTook, Stored
from kvkin.kv.layout import KVLayout
from kvkin.transport.arena import AttachedArenas


class WorkerSide:
    """``report`` hears everything at once; without one the reports are collected until ``take_reports``."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = vllm_config, kv_cache_config
        self._model = built_model()
        self._rank, self._num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._reports: list[Report] = []
        self.report: Callable[[Report], None] = self._reports.append
        self.served: dict[str, Served] = {}
        self._arenas = AttachedArenas()
        self._loads: dict[str, Loading] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._sent: set[str] = set()
        self._num_slices = 0

    @torch.inference_mode()
    def register(self, caches: dict[str, Tensor]) -> None:
        device = next(iter(caches.values())).device
        make_lane = partial(lane_for, self._config, device)
        self.runner = LayerRunner(self._model, self._config, self._kv_cache_config, caches, make_lane)
        self._lane = self.runner.lane
        kv_heads = self._config.model_config.get_total_num_kv_heads()
        self.memory = RankMemory(self.runner, self._arenas, kv_heads, self._rank, self._num_ranks)
        self._work = LoadWork(self.runner, self.memory, self.served, self._say, self._num_ranks)
        layers = {name: layer for layer, name in enumerate(caches)}
        self._watch = ForwardWatch(self._model, layers, self._lane, self._work, self.served, self._say)

    def wait_by(self, await_layer: Callable[[str, int], Sequence[WriteData]]) -> None:
        """How forwards get what a load that was ended early still lacks: the writes of a layer of a request. Waits for them, and raises
        if they do not come in time."""
        self._watch.await_layer = await_layer

    def close(self) -> None:
        if hasattr(self, "_lane"):
            self._lane.close()
        self._arenas.close()

    # --- orders ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def before_step(self, orders: Sequence[Order], progress: Sequence[Progress]) -> None:
        """Before anything of the step runs: what it may overwrite is kept or stored."""
        self._lane.begin_step()
        self._watch.begin(progress)
        saves: list[SwapOut | StoreKV | StoreE] = []
        for order in orders:
            match order:
                case Serve(key, _, taps, capacity):
                    # hidden states are the same on every rank
                    layers = taps if self._rank == 0 else ()
                    states = KeptStates(layers, capacity, self.runner.hidden_size, self.runner.dtype)
                    self.served[key] = Served(order, states)
                case SwapOut() | StoreKV() | StoreE():
                    saves.append(order)
        if saves:
            with self._lane.saving():
                for save in saves:
                    self._save(save)

    @torch.inference_mode()
    def carry_out(self, orders: Sequence[Order]) -> None:
        """The other orders of a step, in order. An error ends its own load only."""
        self._lane.poll()
        self._watch.end()
        if not orders:
            return
        with self._lane.slice():
            span = self._lane.begin()
            with self.runner.adapters.restored():
                for order in orders:
                    self._carry_out(order)
            span.end()
            if is_slice(orders):
                self._num_slices += 1
                number = self._num_slices
                self._lane.then(lambda: self._say(SliceTook(span.seconds, span.step_s, number)), weight=1)

    def _carry_out(self, order: Order) -> None:
        match order:
            case BeginLoad(key):
                self._loads[key] = Loading(order)
            case WriteData(key) | RunUnit(key) | SwapIn(key):
                self._work.carry_out(self._loads[key], order)
            case EndLoad(key):
                load = self._loads.pop(key)
                if order.early:
                    self._watch.early[key] = load
                self._lane.then(partial(self._end_load, order, load))
            case ReleaseBlocks(request_id):
                self._sent.add(request_id)
            case HoldAdapter(ticket):
                self._ticketed(ticket, partial(self._hold, order))
            case Forget(key):
                self._work.forget(key)
                self.served.pop(key, None)
                self._watch.early.pop(key, None)
                self.runner.adapters.release(key)
            case Serve() | SwapOut() | StoreKV() | StoreE():
                pass

    def _end_load(self, order: EndLoad, load: Loading) -> None:
        self._received.add(order.request_id)
        if order.failed or load.failed:
            self._failed.add(order.request_id)

    def _save(self, order: SwapOut | StoreKV | StoreE) -> None:
        if isinstance(order, SwapOut):
            self._work.swap_out(order)
        else:
            self._ticketed(order.ticket, partial(self._store, order))

    def _store(self, order: StoreKV | StoreE, done: Callable[[], None]) -> None:
        if self.runner.adapters.mixes:
            raise RuntimeError("an adapter in the last slot was mixed into other requests (--max-loras, docs/vllm.md)")
        if isinstance(order, StoreKV):
            self.memory.store_blocks(order, done)
        else:
            self.memory.store_states(order, self.served[order.key].states)
            done()

    def _hold(self, order: HoldAdapter, done: Callable[[], None]) -> None:
        self.runner.adapters.hold(order)
        self._lane.then(done)

    def _ticketed(self, ticket: int, action: Callable[[Callable[[], None]], None]) -> None:
        """``action`` is given what to call when it is done."""
        try:
            action(lambda: self._say(Stored(ticket)))
        except Exception as error:  # noqa: BLE001 - told to whoever ordered it
            self._say(Stored(ticket, reason(error)))

    def _say(self, report: Report) -> None:
        self.report(report)

    # --- what comes of it ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def take_results(self, *, idle: bool = False, ordered: bool = False) -> tuple[set[str], set[str], set[str]]:
        """Requests of vLLM whose blocks were (sent, received) since the last call, each once; and which of the received ones failed.

        The step's output is about to be taken, with which a request may end: what its forward computed is said before that. In an ``idle``
        step vLLM computes nothing: nobody is held up by a wait for the device, and without one nobody would hear of it. If something was
        ``ordered`` in it, one slice may go on: the next one is launched behind it.
        """
        if idle:
            self._lane.settle(1 if ordered else 0)
        self._lane.end_forward()
        self._lane.poll()
        results = self._sent, self._received, self._failed
        self._sent, self._received, self._failed = set(), set(), set()
        return results

    @torch.inference_mode()
    def take_reports(self) -> list[Report]:
        """What was reported since the last call, if nobody heard it at once."""
        self._lane.poll()
        taken = list(self._reports)
        self._reports.clear()
        return taken

    # --- the forward -------------------------------------------------------------------------------------------------------

    def layer_needed(self, name: str) -> None:
        """See ``ForwardWatch.layer_needed``."""
        self._watch.layer_needed(name)

    def layer_saved(self, name: str, metadata: Any) -> None:
        """See ``ForwardWatch.layer_saved``."""
        self._watch.layer_saved(name, metadata)

    # --- calls between steps (``workers.py``) ------------------------------------------------------------------------------

    def cache_shape(self) -> CacheShape:
        return self.memory.shape

    @torch.inference_mode()
    def read_kv(self, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See ``RankMemory.read_kv``."""
        return self.memory.read_kv(layer, block_ids, start, stop)

    @torch.inference_mode()
    def store_kv(self, layer: int, block_ids: Sequence[int], start: int, place: Bytes, layout: KVLayout) -> None:
        """See ``RankMemory.store_kv``."""
        self.memory.store_kv(layer, block_ids, start, place, layout)

    def states(self, key: str, layer: int, start: int, stop: int) -> Tensor | None:
        """Kept hidden states (stop - start, hidden); None on the ranks that keep none. Raises RuntimeError once they are gone."""
        served = self.served.get(key)
        if served is None:
            raise RuntimeError("the hidden states of this request were given back")
        return served.states.states(layer, start, stop) if self._rank == 0 else None

    def first_distribution(self, key: str) -> NDArray[np.float32] | None:
        """Log probabilities (vocab,) of a request's first token; each once."""
        return first_distribution_of(key)

"""KvkinConnector: what vLLM loads (``kv_connector_module_path``). It delegates: one side plans, the other carries out.

vLLM makes two of them: one in its scheduler, one in each worker. See ``scheduler_side.py`` and ``worker_side.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvkin.engines.vllm.compat import check_version
from kvkin.engines.vllm.orders import Order, Progress
from kvkin.engines.vllm.reports import Report
from kvkin.engines.vllm.scheduler_side import SchedulerSide
from kvkin.engines.vllm.serving import clear_refusal, open_link, serving_options
from kvkin.engines.vllm.serving_checks import check_serving, dtype_of
from kvkin.engines.vllm.serving_side import ServingSide
from kvkin.engines.vllm.worker_side import WorkerSide
from kvkin.kv.errors import ConfigError


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's orders, from the scheduler side to every worker. ``idle``: vLLM computes nothing in it."""

    orders: Sequence[Order] = ()
    progress: Sequence[Progress] = ()
    idle: bool = False


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """One step's reports, from every worker in a process of its own to the scheduler side."""

    by_rank: tuple[tuple[Report, ...], ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        assert isinstance(other, StepReports)
        return StepReports((*self.by_rank, *other.by_rank))


class KvkinConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version()
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError(
                "vllm", "the model's layers have several kinds of KV cache", "full attention in all layers"
            )
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = _scheduler_side(vllm_config)
        else:
            self.worker_side = WorkerSide(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # save_kv_layer watches every layer of a forward

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None
        return self.scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None
        return self.worker_side

    def _step(self) -> StepOrders:
        step = self._get_connector_metadata()
        assert isinstance(step, StepOrders)
        return step

    # --- scheduler side ----------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        step = self._scheduler.plan_step(scheduler_output)
        return StepOrders(step.orders, step.progress, step.idle)

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        if reports is not None:
            assert isinstance(reports, StepReports)
            self._scheduler.step_reported(reports.by_rank)
        self._scheduler.received(set(connector_output.finished_recving or ()))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        side = self._scheduler
        said = side.answered(request) if isinstance(side, ServingSide) else None
        return side.finished(request, block_ids), said

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_blocks()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_orders

    # --- worker side -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepOrders)
        self._worker.before_step(kv_connector_metadata.orders, kv_connector_metadata.progress)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.carry_out(self._step().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.layer_needed(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.layer_saved(layer_name, attn_metadata)

    def wait_for_save(self) -> None:
        pass  # what is saved is copied where it is announced

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        step = self._step()
        sent, received, failed = self._worker.take_results(idle=step.idle, ordered=bool(step.orders))
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports = self._worker.take_reports()
        return StepReports((tuple(reports),)) if reports else None

    def shutdown(self) -> None:
        if isinstance(self.scheduler_side, ServingSide):
            self.scheduler_side.close()
        if self.worker_side is not None:
            self.worker_side.close()


def _scheduler_side(vllm_config: Any) -> SchedulerSide:
    """A node's, whose engine enters its requests; or that of a server of its own, which joins a family."""
    block_size, ranks = vllm_config.cache_config.block_size, vllm_config.parallel_config.tensor_parallel_size
    transfer = vllm_config.kv_transfer_config
    if "taps" in transfer.kv_connector_extra_config:
        return SchedulerSide(block_size, ranks)
    with clear_refusal():
        options = serving_options(transfer.kv_connector_extra_config)
        check_serving(vllm_config, options)
        link = open_link(options, str(vllm_config.model_config.model), dtype_of(vllm_config))
    # vLLM's default fails a request whose load fails
    transfer.kv_load_failure_policy = "recompute"
    return ServingSide(
        block_size,
        ranks,
        link,
        wishes=options.wishes,
        plan_s=options.config.timeouts.plan_s,
        consumes=transfer.is_kv_consumer,
        produces=transfer.is_kv_producer,
    )

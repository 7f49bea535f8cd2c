"""Workers: what the engine asks of the processes that run the model, between two steps of vLLM.

One rank in the engine's own process is asked directly, ranks in processes of their own through vLLM's ``collective_rpc``. A call never
raises on a worker: a rank's answer that nobody takes would be taken for the next call's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvkin.engines.api import Arrival
from kvkin.engines.block_bytes import e_view, kv_views
from kvkin.engines.vllm.orders import Bytes
from kvkin.engines.vllm.rank_memory import CacheShape
from kvkin.engines.vllm.ranks import joined
from kvkin.kv.errors import NodeUnavailable
from kvkin.kv.layout import KVLayout
from kvkin.transport.arena import place_of

if TYPE_CHECKING:
    from kvkin.engines.vllm.worker_side import WorkerSide

CALL_S = 60.0
"""Seconds after which a worker that does not answer is taken for dead."""

Call = Callable[..., list[Any]]
"""``call(method of WorkerSide, *arguments)`` -> what each rank answers."""


class Workers:
    """``remote`` workers map the arenas of this process; others see its memory."""

    def __init__(self, call: Call, *, remote: bool) -> None:
        self._call, self.remote = call, remote
        self.lost = False
        """Nothing can be asked any more: the engine has failed."""
        self.shape: CacheShape = call("cache_shape")[0]

    def parts(self, arrival: Arrival) -> tuple[tuple[int, Bytes], ...]:
        """An arrival's parts as orders carry them: to other processes by their place, and with their bytes if they have none."""
        if not self.remote:
            return arrival.parts
        return tuple((start, place_of(data) or data) for start, data in arrival.parts)

    def read_kv(self, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values (stop - start, kv_heads, head_dim) of a request's tokens: copies in host memory."""
        keys, values = zip(*self._call("read_kv", layer, block_ids, start, stop), strict=True)
        return joined(keys, self.shape.kv_heads), joined(values, self.shape.kv_heads)

    def store_kv(
        self, layer: int, block_ids: Sequence[int], start: int, data: NDArray[np.uint8], layout: KVLayout
    ) -> None:
        """Copy tokens from ``start`` on of one layer into whole blocks (writable bytes, contiguous)."""
        place = place_of(data) if self.remote else None
        if place is not None or not self.remote:
            self._call("store_kv", layer, block_ids, start, place or data, layout)
            return
        planes = kv_views(data, layout)
        stop = start + planes[0].shape[0] * planes[0].shape[1]
        for plane, source in zip(planes, self.read_kv(layer, block_ids, start, stop), strict=True):
            plane.copy_(source.view(plane.shape))

    def states(self, key: str, layer: int, start: int, stop: int) -> Tensor:
        """Kept hidden states (stop - start, hidden). Raises RuntimeError once they are gone."""
        found: Tensor = self._call("states", key, layer, start, stop)[0]
        return found

    def store_e(self, key: str, layer: int, start: int, data: NDArray[np.uint8], layout: KVLayout) -> None:
        """Copy kept hidden states of tokens from ``start`` on into whole blocks."""
        into = e_view(data, layout)
        into.copy_(self.states(key, layer, start, start + len(into)))

    def first_distribution(self, key: str) -> NDArray[np.float32] | None:
        """Log probabilities (vocab,) of a request's first token, each once; None if nobody asked for them."""
        found: NDArray[np.float32] | None = self._call("first_distribution", key)[0]
        return found


def direct(side: WorkerSide) -> Workers:
    """The one worker of an engine whose model runs in this process."""
    return Workers(lambda method, *arguments: [getattr(side, method)(*arguments)], remote=False)


def remote(llm: Any) -> Workers:
    """The workers of an engine whose ranks are processes."""

    def call(method: str, *arguments: Any) -> list[Any]:
        try:
            answers = llm.collective_rpc(answer, timeout=CALL_S, args=(method, arguments))
        except (RuntimeError, OSError) as error:  # a timeout is an OSError
            raise NodeUnavailable(f"the processes that run the model do not answer: {error}") from error
        failed = [why for why, _ in answers if why]
        if failed:
            raise RuntimeError(f"{method}: {failed[0]}")
        return [answer for _, answer in answers]

    return Workers(call, remote=True)


def answer(_: Any, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """In a worker's process: (why it failed, or nothing; the answer)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    try:
        return "", getattr(connector.worker_side, method)(*arguments)
    except Exception as error:  # noqa: BLE001 - raised in the engine's process
        return f"{type(error).__name__}: {error}", None

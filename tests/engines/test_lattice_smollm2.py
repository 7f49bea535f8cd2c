"""The group lattice on the demo family: SmolLM2-135M as sender, a LoRA fine-tune of it as receiver, real text."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from engine_harness import exact, partial, plan_of
from peft import PeftModel
from states_harness import kl, oracle_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkin.engines.answers import forced_logits
from kvkin.engines.lattice import group_divergences, lattice_groups
from kvkin.engines.loading import load_model
from kvkin.engines.states import full_states
from kvkin.kv.errors import ConfigError
from kvkin.kv.plan import LayerGroup
from kvkin.tools.smollm2 import prepare_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
STARTS, STOPS = (0, 10, 20), (10, 20, 30)
TOLERANCE = 1e-4


def test_the_demo_pair() -> None:
    """SmolLM2-135M and a LoRA fine-tune of it on real text, against transformers with the adapter as peft applies it."""
    adapter = ROOT / "configs" / "models" / "smollm2-135m-qa"
    if not (adapter / "adapter_model.safetensors").is_file():
        pytest.skip(f"the adapter {adapter.name} is not there; make it with kvkin finetune")
    try:
        base = prepare_base(ROOT)
    except ConfigError as error:
        pytest.skip(str(error))
    torch.set_num_threads(1)  # under load, a second thread costs more than it gives
    text = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split("TERMS AND CONDITIONS", 1)[1].split())
    ids = AutoTokenizer.from_pretrained(base)(text).input_ids
    context, suffix, answer = ids[:96], ids[96:108], ids[108:113]
    models = [
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa").eval()
        for _ in range(2)
    ]
    models[1] = PeftModel.from_pretrained(models[1], str(adapter)).merge_and_unload().eval()
    held = dict(zip(("sender", "receiver"), (oracle.private(model, context) for model in models), strict=True))
    reference_logits = oracle_logits(models[1], held["receiver"], suffix, answer)

    ops = load_model(base, adapter, device="cpu", compute_dtype="float32").ops
    sender = full_states(load_model(base, None, device="cpu", compute_dtype="float32").ops, context, keep_hidden=True)
    wanted = forced_logits(ops, [full_states(ops, context)], suffix, answer)[0]
    found = group_divergences(ops, context, sender, suffix, answer, STARTS, STOPS, wanted)
    assert list(found) == [None, *lattice_groups(STARTS, STOPS)]
    assert found[LayerGroup(0, 30)] < 1e-6
    for group, segment in (
        (None, exact(0, 96, "sender", num_layers=30)),
        (LayerGroup(0, 10), partial(0, 96, (0, 10), "sender", num_layers=30)),
        (LayerGroup(10, 20), partial(0, 96, (10, 20), "sender", num_layers=30)),
        (LayerGroup(20, 30), partial(0, 96, (20, 30), "sender", num_layers=30)),
    ):
        state = oracle.execute(models[1], context, plan_of(segment), held)
        logits = oracle_logits(models[1], state, suffix, answer)
        assert found[group] == pytest.approx(kl(reference_logits, logits), abs=TOLERANCE)
        assert found[group] > 10 * TOLERANCE, "the two models differ here, or this proves nothing"

"""The model card of a fine-tune: ``kvkin_card.json`` for machines and ``README.md`` for people, from the same facts.

Called by ``finetune.py`` once an adapter or a checkpoint is trained, saved and scored. Cards name data and base, never paths.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkin.tools.finetune_data import SPLIT_RULE, Corpus, Probe
from kvkin.tools.finetune_probes import Scores, gain, probes_digest

if TYPE_CHECKING:
    from kvkin.tools.finetune_loop import Progress

CARD_FORMAT = 1
NUM_EXAMPLES = 6


@dataclass(frozen=True)
class Card:
    """The facts: ``settings`` of the run, and per held-out prompt the texts of (base, fine-tune)."""

    settings: Mapping[str, Any]
    base: Path
    base_name: str
    data_note: str
    corpus: Corpus
    progress: Progress
    metric: str
    probes: Sequence[Probe]
    before: Scores
    after: Scores
    texts: tuple[Sequence[str], Sequence[str]]
    stored_type: str = "bfloat16"


def write_card(out: Path, card: Card) -> None:
    """Write both files into ``out``."""
    facts = card_facts(card)
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    (out / "kvkin_card.json").write_text(text + "\n", encoding="utf-8")
    (out / "README.md").write_text(readme(out.name, facts), encoding="utf-8")


def card_facts(card: Card) -> dict[str, Any]:
    """The card as JSON values."""
    facts: dict[str, Any] = {
        "format": CARD_FORMAT,
        "base": {"name": card.base_name, "weights_blake2b": weights_digest(card.base)},
        "task": card.settings["task"],
        "data": {"name": card.corpus.label, "blake2b": card.corpus.digest, "note": card.data_note},
        "split": {"rule": SPLIT_RULE} | {name: list(groups) for name, groups in card.corpus.splits.items()},
        "settings": dict(card.settings),
        "training": {
            "steps": card.progress.step,
            "tokens": card.progress.tokens,
            "seconds": round(card.progress.seconds, 1),
            "loss_curve": card.progress.curve(),
        },
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
    }
    if card.probes:
        facts["scores"] = {
            "metric": card.metric,
            "decoding": f"greedy, float32, {_result(card.settings)} reloaded from {card.stored_type}",
            "prompts_blake2b": probes_digest(card.probes),
            "before": card.before.as_dict(),
            "after": card.after.as_dict(),
            "gain": gain(card.before, card.after).as_dict(),
        }
        old, new = card.texts
        facts["examples"] = [
            {
                "kind": probe.kind,
                "group": probe.group,
                "answers": list(probe.answers),
                "base": before,
                "fine_tune": after,
            }
            for probe, before, after in list(zip(card.probes, old, new, strict=True))[:NUM_EXAMPLES]
        ]
    return facts


def _result(settings: Mapping[str, Any]) -> str:
    """What came out: cards of the first version knew adapters only and do not say."""
    return "checkpoint" if settings.get("method") == "full" else "adapter"


def weights_digest(base: Path) -> str:
    """BLAKE2b-128 over the base's safetensors files, in the order of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(base.glob("*.safetensors")):
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def readme(name: str, facts: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    settings, training, data, split = facts["settings"], facts["training"], facts["data"], facts["split"]
    unit = "article" if facts["task"] == "qa" else "module"
    parts = ", ".join(f"{len(split[part])} {part}" for part in ("train", "profile", "test"))
    note = f". {data['note']}" if data["note"] else ""
    recipe = (
        f"seed {settings['seed']}, peak learning rate {settings['learning_rate']:g}, {settings['batch_samples']} sequences "
        f"of at most {settings['seq_len']} tokens a step; {training['steps']} steps, {training['tokens']:,} tokens in "
        f"{training['seconds'] / 60:.0f} minutes; loss {_curve(training['loss_curve'])}"
    )
    layers = "all layers" if settings["layers"] == "all" else f"layers {settings['layers']} (half-open)"
    result = _result(settings)
    if result == "checkpoint":
        kind, command, what = "fully tuned checkpoint", "kvkin finetune --method full", "Trained"
        shape = f"all parameters of {layers}{_outside_layers(settings)}; the rest is the base's, bit for bit"
    else:
        kind, command, what = "LoRA adapter", "kvkin finetune", "Adapter"
        shape = f"rank {settings['rank']}, {layers}, {', '.join(settings['targets'])}; bfloat16"
    lines = [
        f"# {name}",
        "",
        f"A {kind} of {facts['base']['name']}, made with `{command} --task {facts['task']}`.",
        "",
        f"- **Data**: {data['name']} (BLAKE2b {data['blake2b']}){note}",
        f"- **Split** by {unit}, {split['rule']}: {parts} (listed in kvkin_card.json)",
        f"- **{what}**: {shape}",
        f"- **Training**: {recipe}",
        f"- **Made with**: {', '.join(f'{key} {value}' for key, value in facts['versions'].items())}",
        "",
    ]
    if "scores" in facts:
        lines += _score_lines(facts["scores"], result)
    return "\n".join(lines)


def _outside_layers(settings: Mapping[str, Any]) -> str:
    if settings["layers"] != "all":
        return ""
    return ", final norm, embeddings and head" if settings["train_embeddings"] else " and the final norm"


def _score_lines(scores: Mapping[str, Any], result: str) -> list[str]:
    gained = scores["gain"]
    rows = [
        f"| {kind} | {before['n']} | {before['mean']:.3f} | {scores['after'][kind]['mean']:.3f} |"
        for kind, before in scores["before"].items()
    ]
    return [
        "## Scores on held-out prompts",
        "",
        f"{scores['metric']}; {scores['decoding']}; identical prompts for both.",
        "",
        f"| prompts | n | base | this {result} |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Paired gain over all: {gained['mean']:+.3f} ± {gained['half_width_95']:.3f} (95 %).",
        "",
    ]


def _curve(points: Sequence[Mapping[str, float]]) -> str:
    """A handful of the curve's losses, first and last included."""
    if not points:
        return "none"
    picked = sorted({round(index * (len(points) - 1) / 5) for index in range(6)})
    return " → ".join(f"{points[index]['loss']:.2f}" for index in picked)

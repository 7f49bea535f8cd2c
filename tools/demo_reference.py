"""What the demo's answers are compared with: plain transformers (and peft) in a process of their own.

    python -m kvkin.tools.demo_reference SPEC.json OUT.json

No engine of kvkin is imported: models are loaded as anyone would, prompts are rendered by the tokenizer's own chat template,
and answers of exact quality come from ``generate``. For a partial plan the same computation is done by hand with the models'
unmodified layers (DroidSpeak): the sender reads the context, the receiver recomputes its group of layers from the sender's
hidden states, takes the sender's keys and values for the others, and reads on from there. Run by ``demo.py`` after the
cluster has stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Reference:
    """Loads each model on first use and answers the requests of a spec in order."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._models: dict[str, Any] = {}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(spec["tokenizer"])
        # (model, ids, KV) of every published answer: what a node that reuses its own approximate context starts from
        self._published: list[tuple[str, list[int], Any]] = []

    def model(self, name: str) -> Any:
        if name not in self._models:
            entry = self._spec["models"][name]
            model: Any = AutoModelForCausalLM.from_pretrained(entry["checkpoint"], dtype=torch.float32)
            if entry["adapter"]:
                model = PeftModel.from_pretrained(model, entry["adapter"]).merge_and_unload()
            self._models[name] = model.eval()
        return self._models[name]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens of one request, with the gap between the two best logits at each."""
        messages = request["messages"]
        ids = self._encode(request["prompt"]) if messages is None else self.prompt_ids(messages)
        model, eos = self.model(request["model"]), set(request["eos"])
        if request["quality"] == "exact":
            tokens, gaps, cache = _generate(model, ids, request["max_tokens"], sorted(eos))
        else:
            cache, logits = self._partial(request, ids)
            tokens, gaps = _greedy(model, cache, logits, request["max_tokens"], eos)
        self._published.append((request["model"], ids + tokens[:-1], cache))
        return {"prompt_tokens": len(ids), "tokens": tokens, "gaps": gaps}

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation. Answers keep the ids that were generated, as far as those are the answer's text."""
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        text: str = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        ids: list[int] = []
        for message in messages:
            if "token_ids" not in message:
                continue
            before, found, text = text.partition(f"assistant\n{message['content']}")
            assert found, "the template changes answers"
            said, unsaid = self._said(message["content"], message["token_ids"])
            ids += self._encode(f"{before}assistant\n") + said
            text = unsaid + text
        return ids + self._encode(text)

    def _said(self, content: str, ids: list[int]) -> tuple[list[int], str]:
        """The longest start of ``ids`` whose text begins ``content`` (no end of turn, no broken characters), and the rest."""
        while ids and not content.startswith(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)):
            ids = ids[:-1]
        return ids, content[len(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) :] if ids else content

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    # --- partial plans -----------------------------------------------------------------------------------------------

    def _partial(self, request: dict[str, Any], ids: list[int]) -> tuple[Any, torch.Tensor]:
        """The prompt's KV segment by segment, and the logits after its last token."""
        name = request["model"]
        model = self.model(name)
        cache: Any = DynamicCache(config=model.config)
        logits = torch.empty(0)
        for segment in request["segments"]:
            start, stop = segment["start"], segment["stop"]
            rows = torch.tensor([ids[start:stop]])
            if segment["kind"] == "computed":
                logits = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            elif segment["group"] is None and segment["holder"] == name:
                self._take_own(name, ids[:stop], start, cache)
            else:
                self._take_and_recompute(
                    model, self.model(segment["holder"]), ids[:stop], start, segment["group"], cache
                )
        return cache, logits

    def _take_own(self, name: str, ids: list[int], start: int, cache: Any) -> None:
        """KV of the model's own earlier answer, as approximate as that was."""
        held = next(kv for model, known, kv in reversed(self._published) if model == name and known[: len(ids)] == ids)
        for layer, (keys, values) in enumerate(_layers(held)):
            cache.update(keys[:, :, start : len(ids)], values[:, :, start : len(ids)], layer)

    def _take_and_recompute(
        self, model: Any, sender: Any, ids: list[int], start: int, group: list[int] | None, cache: Any
    ) -> None:
        read = sender.model(torch.tensor([ids]), use_cache=True, output_hidden_states=True)
        first, last = group or (0, 0)
        for layer, (keys, values) in enumerate(_layers(read.past_key_values)):
            if not first <= layer < last:
                cache.update(keys[:, :, start:], values[:, :, start:], layer)
        positions = torch.arange(start, len(ids))[None]
        # layer 0 takes embeddings, and those are the receiver's own
        hidden = (
            read.hidden_states[first][:, start:] if first else model.model.embed_tokens(torch.tensor([ids[start:]]))
        )
        rotations = model.model.rotary_emb(hidden, positions)
        visible = torch.arange(len(ids))[None] <= positions[0][:, None]
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
        for layer in range(first, last):
            out = model.model.layers[layer](
                hidden,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                position_embeddings=rotations,
            )
            hidden = out[0] if isinstance(out, tuple) else out


def _layers(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _generate(model: Any, ids: list[int], max_tokens: int, eos: list[int]) -> tuple[list[int], list[float], Any]:
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0],
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(ids) :].tolist(), [_gap(step[0]) for step in out.logits], out.past_key_values


def _greedy(
    model: Any, cache: Any, logits: torch.Tensor, max_tokens: int, eos: set[int]
) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    gaps: list[float] = []
    while True:
        tokens.append(int(logits.argmax()))
        gaps.append(_gap(logits))
        if len(tokens) == max_tokens or tokens[-1] in eos:
            return tokens, gaps
        step = torch.tensor([[tokens[-1]]])
        logits = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def _gap(logits: torch.Tensor) -> float:
    best, second = torch.topk(logits.float(), 2).values.tolist()
    return float(best - second)


def run(spec: dict[str, Any], on_done: Callable[[int], None] = lambda number: None) -> list[dict[str, Any]]:
    """Answers of all requests, in order."""
    answers = []
    with torch.no_grad():
        reference = Reference(spec)
        for number, request in enumerate(spec["requests"], 1):
            answers.append(reference.answer(request))
            on_done(number)
    return answers


def main(spec_file: str, out_file: str) -> None:
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    answers = run(spec, lambda number: print(number, flush=True))
    Path(out_file).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

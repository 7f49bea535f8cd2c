"""Tiny random checkpoints of every supported architecture, a tokenizer and LoRA adapters, made on the fly.

The configs, engine and oracle tests use them. Weights are random with a spread of about 0.2, so that attention is far from
uniform and a wrong mask, a skipped rotation or a swapped layer shows in the logits; norms vary around 1 and biases
around 0 for the same reason. Everything depends on ``seed`` alone. Nothing here reads the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mixtral")

# Sliding windows are shorter than the contexts that tests use, so that the window decides.
SLIDING_WINDOW = 24
VOCAB_SIZE = 320
WEIGHT_STD = 0.2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2  # <|im_end|>, as in SmolLM2


def tiny_config(arch: str, num_layers: int = 4, **overrides: Any) -> Any:
    """The transformers config of a tiny model: hidden 64, 4 query and 2 KV heads of 16, context of 512 tokens."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "tie_word_embeddings": arch == "llama",
    }
    special: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": SLIDING_WINDOW},
        "qwen2": {},  # has biases on q, k and v
        "qwen3": {"head_dim": 24},  # q_norm and k_norm; heads wider than hidden_size / num_heads, as in the real ones
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    }
    classes = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mixtral": transformers.MixtralConfig,
    }
    if arch not in classes:
        raise ValueError(f"unknown architecture {arch!r}; one of {', '.join(ARCHITECTURES)}")
    return classes[arch](**{**common, **special[arch], **overrides})


def make_tiny(
    arch: str, path: Path, *, seed: int = 0, num_layers: int = 4, tokenizer: bool = True, **overrides: Any
) -> Path:
    """Write a tiny random float32 checkpoint of ``arch`` (with the tiny tokenizer) into ``path`` and return it.

    ``overrides`` are config fields, e.g. ``sliding_window=8`` or ``rope_parameters={...}``.
    """
    import transformers

    config = tiny_config(arch, num_layers, **overrides)
    config.architectures = None
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(path))
    if tokenizer:
        make_tiny_tokenizer(path)
    return path


def randomize(model: Any, seed: int) -> None:
    """Fill every parameter of ``model`` in place: norms around 1, everything else around 0.

    Norms of queries and keys lie around 2: they fix the length of what they norm, and at 1 attention would be flat.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * WEIGHT_STD
            centre = 2.0 if "q_norm" in name or "k_norm" in name else 1.0 if "norm" in name else 0.0
            parameter.copy_(noise + centre)


def make_tiny_tokenizer(
    path: Path, extra_tokens: Iterable[str] = (), chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write a byte-level tokenizer (3 special tokens, 256 bytes, a few merges) with a chat template into ``path``.

    ``extra_tokens`` become added tokens after the ordinary vocabulary, as fine-tunes do.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the"), ("Ġ", "a"), ("o", "n")]
    words = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in extra_tokens])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<|endoftext|>")
    if chat_template is not None:
        fast.chat_template = chat_template
    path.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(str(path))
    return path


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_tiny_lora(
    base_path: Path,
    out: Path,
    layers: Iterable[int],
    seed: int = 0,
    *,
    rank: int = 4,
    targets: Iterable[str] = LORA_TARGETS,
    **config: Any,
) -> Path:
    """Write a LoRA adapter in peft's format for the attention projections of ``layers`` into ``out`` and return it.

    Both A and B are random, so that the adapter changes the model. ``config`` fields go into adapter_config.json.
    """
    base = json.loads((base_path / "config.json").read_text(encoding="utf-8"))
    hidden, heads, kv_heads = base["hidden_size"], base["num_attention_heads"], base["num_key_value_heads"]
    head_dim = base.get("head_dim") or hidden // heads
    shapes = {  # (in, out) of each projection
        "q_proj": (hidden, heads * head_dim),
        "k_proj": (hidden, kv_heads * head_dim),
        "v_proj": (hidden, kv_heads * head_dim),
        "o_proj": (heads * head_dim, hidden),
    }
    layers, targets = sorted(layers), sorted(targets)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        for target in targets:
            fan_in, fan_out = shapes[target]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            for half, shape in (("lora_A", (rank, fan_in)), ("lora_B", (fan_out, rank))):
                noise = torch.randn(shape, generator=generator, dtype=torch.float32)
                tensors[f"{prefix}.{half}.weight"] = (noise * WEIGHT_STD).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_path),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": list(targets),
        "layers_to_transform": layers,
        "layers_pattern": "layers",
        **config,
    }
    (out / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n", encoding="utf-8")
    return out

"""Checkpoints: what a model is, read from its files without torch or transformers.

:func:`read_model` turns a folder (and a LoRA adapter) into a :class:`ModelIdentity`: geometry, lineage, head, tokenizer, template
and limits. Weights are read once, as a stream, and their digests cached, so a node's next start costs some headers.
Called by ``configs.families`` in every process that must know what a model is. Implements docs/design.md section 4.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from kvkin.configs.adapters import ADAPTER_CONFIG, HEAD_LAYER, Adapter, adapter_digests, read_adapter
from kvkin.configs.architectures import Geometry, read_geometry
from kvkin.configs.digests import DigestCache, Progress, tensor_digests
from kvkin.configs.layer_tensors import EMBEDDING, HEAD, ModelTensors, is_kv_input, sort_tensors
from kvkin.configs.numerics import lineage_class, numerics_class
from kvkin.configs.prompt_files import TokenizerIdentity, read_chat_template, read_eos_ids, read_tokenizer
from kvkin.configs.safetensors_files import TensorRef, read_json, read_tensors
from kvkin.configs.schema import local_path
from kvkin.kv.errors import ConfigError
from kvkin.kv.hashing import digest
from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?:@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class ModelIdentity(msgspec.Struct, frozen=True):
    """Everything about a model that others need to know without loading it."""

    name: str
    path: Path  # folder of the checkpoint
    adapter_path: Path | None  # folder of the LoRA adapter
    geometry: Geometry
    numerics: str  # weights/compute/KV, see configs.numerics
    lineage: Lineage
    head_digest: bytes  # of what makes logits of the last layer's output, which no lineage covers
    tokenizer: TokenizerIdentity | None  # None: no tokenizer of its own, the family's is meant
    chat_template: str | None  # None: no template of its own
    eos_ids: tuple[int, ...]

    @property
    def architecture(self) -> str:
        return self.geometry.architecture

    @property
    def num_layers(self) -> int:
        return self.geometry.num_layers

    @property
    def vocab_size(self) -> int:
        return self.geometry.vocab_size

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt + answer that the checkpoint is made for."""
        return self.geometry.max_position

    @property
    def logits_digest(self) -> bytes:
        """Digest of all that the logits come of: every layer as a whole, and the head. Equal ones answer alike."""
        return digest(b"logits", self.lineage.id, self.lineage.hidden[-1], self.head_digest)

    @property
    def tokenizer_digest(self) -> bytes:
        """Digest of text -> ids; empty without a tokenizer of its own."""
        return b"" if self.tokenizer is None else self.tokenizer.digest

    @property
    def chat_template_digest(self) -> bytes:
        """Digest of the template; empty without one of its own."""
        return b"" if self.chat_template is None else digest(b"template", self.chat_template.encode())

    @property
    def bos_id(self) -> int | None:
        """The id put before a plain prompt, if any."""
        return None if self.tokenizer is None else self.tokenizer.bos_id

    def layout(self, dtype: str, block_size: int) -> KVLayout:
        """How the model's KV lies in memory with elements of ``dtype``."""
        plane = (self.geometry.kv_heads, self.geometry.head_dim)
        planes = (Plane("keys", *plane), Plane("values", *plane))
        return KVLayout(self.num_layers, planes, self.geometry.hidden_size, dtype, block_size)


def read_model(
    name: str,
    checkpoint: str,
    adapter: str | None = None,
    *,
    compute_dtype: str,
    kv_dtype: str | None = None,
    quantization: str | None = None,
    cache_dir: Path | None = None,
    family_vocab: int | None = None,
    progress: Progress | None = None,
    key: str = "",
) -> ModelIdentity:
    """Read and digest a model.

    ``checkpoint`` and ``adapter`` are folders or hub ids. ``cache_dir`` keeps digests (none: hash again). ``family_vocab``
    is the number of embedding rows that count: the base's vocabulary (none: this model's own), so that tokens which a
    fine-tune added do not hide what it shares. ``kv_dtype`` defaults to ``compute_dtype``. ``quantization`` is the method by which
    the engine quantises the weights as it loads them; none: it does not. Raises ConfigError, under ``key`` + ".checkpoint" or
    ".adapter", for whatever cannot be used.
    """
    key = key or f"models.{name}"
    model_key, adapter_key = f"{key}.checkpoint", f"{key}.adapter"
    folder = locate(checkpoint, "config.json", model_key)
    config = read_json(folder / "config.json", model_key)
    geometry = read_geometry(config, model_key)
    if family_vocab is not None and geometry.vocab_size < family_vocab:
        problem = f"{folder} has {geometry.vocab_size} tokens, fewer than the base"
        raise ConfigError(model_key, problem, f"at least the base's {family_vocab}")
    tensors = sort_tensors(read_tensors(folder, "model", model_key), geometry, model_key)
    cache = DigestCache(cache_dir)
    adapter_folder = None if adapter is None else locate(adapter, ADAPTER_CONFIG, adapter_key)
    changed = Adapter(())
    if adapter_folder is not None:
        changed = read_adapter(adapter_folder, tensors, adapter_key)
    changes = adapter_digests(changed.modules, cache, adapter_key, progress)
    numerics = numerics_class(tensors.weight_dtype, compute_dtype, kv_dtype or compute_dtype, quantization)
    rows = family_vocab or geometry.vocab_size
    head = _head_rows(changed.head or tensors.head, rows)
    digests = tensor_digests([*_kv_tensors(tensors, rows), *_head_tensors(tensors, head)], cache, model_key, progress)
    lineage = _lineage(geometry, tensors, changes, numerics, digests)
    head_digest = _head_digest(geometry, tensors, head, changes.get(HEAD_LAYER, {}), digests)
    tokenizer, template = _prompt_files(folder, adapter_folder, model_key, adapter_key)
    eos_ids = read_eos_ids(folder, config, geometry.vocab_size, model_key)
    return ModelIdentity(
        name, folder, adapter_folder, geometry, numerics, lineage, head_digest, tokenizer, template, eos_ids
    )


def _kv_tensors(tensors: ModelTensors, rows: int) -> list[TensorRef]:
    """The tensors that determine KV, under the names that their digests have: neither final norm nor head."""
    named = [_as(tensors.embedding.rows(0, rows), EMBEDDING)]
    named += [_as(tensor, f"outside.{name}") for name, tensor in tensors.unknown.items()]
    for index, layer in enumerate(tensors.layers):
        named += [_as(tensor, f"{index}.{name}") for name, tensor in layer.items()]
    return named


def _head_rows(head: TensorRef, rows: int) -> list[TensorRef]:
    """The matrix that makes logits: the family's rows, and those of added tokens. A tied embedding's first part is read as such."""
    parts = [(0, rows), (rows, head.shape[0])]
    return [head.rows(*part, f"{HEAD}.{index}") for index, part in enumerate(parts) if part[0] < part[1]]


def _head_tensors(tensors: ModelTensors, head: list[TensorRef]) -> list[TensorRef]:
    """The tensors behind the last layer, under the names that their digests have."""
    return [*head, *(_as(tensor, f"after.{name}") for name, tensor in tensors.after.items() if name != HEAD)]


def _head_digest(
    geometry: Geometry,
    tensors: ModelTensors,
    head: list[TensorRef],
    changes: dict[str, bytes],
    digests: dict[str, bytes],
) -> bytes:
    """One digest of what makes logits; the same for a tied head and a copy of the embedding."""
    matrix = digest(b"head rows", *(digests[part.name] for part in head))
    others = {name: digests[f"after.{name}"] for name in tensors.after if name != HEAD} | changes
    return digest(b"head", geometry.head_digest, matrix, _named_digest(b"after", others))


def _lineage(
    geometry: Geometry,
    tensors: ModelTensors,
    changes: dict[int, dict[str, bytes]],
    numerics: str,
    digests: dict[str, bytes],
) -> Lineage:
    """Fold the digests of the tensors that determine KV."""
    unknown = {name: digests[f"outside.{name}"] for name in tensors.unknown}
    root = digest(b"root", geometry.semantic_digest, digests[EMBEDDING], _named_digest(b"outside", unknown))
    layers = []
    for index, layer in enumerate(tensors.layers):
        whole = {name: digests[f"{index}.{name}"] for name in layer} | changes.get(index, {})
        kv_inputs = {name: value for name, value in whole.items() if is_kv_input(name)}
        parts = _named_digest(b"kv_inputs", kv_inputs), _named_digest(b"whole", whole)
        layers.append(LayerWeights(*parts, geometry.layer_digest(index)))
    return fold_lineage(root, lineage_class(numerics), layers)


def _named_digest(domain: bytes, digests: dict[str, bytes]) -> bytes:
    """One digest of named digests, independent of their order in the files."""
    return digest(domain, *(part for name in sorted(digests) for part in (name.encode(), digests[name])))


def _as(tensor: TensorRef, name: str) -> TensorRef:
    return msgspec.structs.replace(tensor, name=name)


def _prompt_files(
    folder: Path, adapter_folder: Path | None, model_key: str, adapter_key: str
) -> tuple[TokenizerIdentity | None, str | None]:
    """Tokenizer and template of a model; what an adapter brings along counts before its checkpoint's."""
    tokenizer, template = None, None
    if adapter_folder is not None:
        tokenizer = read_tokenizer(adapter_folder, adapter_key)
        template = read_chat_template(adapter_folder, adapter_key)
    if tokenizer is None:
        tokenizer = read_tokenizer(folder, model_key)
    return tokenizer, read_chat_template(folder, model_key) if template is None else template


def locate(text: str, needed: str, key: str) -> Path:
    """The folder that a configured path or hub id means; it holds the file ``needed``.

    A hub id (org/name, or org/name@revision) is looked up on the Hugging Face hub only where no such folder exists.
    """
    path = local_path(text)
    if path.is_dir():
        if not (path / needed).is_file():
            kind = "an adapter in peft's format" if needed == ADAPTER_CONFIG else "config.json and safetensors"
            raise ConfigError(key, f"{path} has no {needed}", f"a folder with {kind}")
        return path
    if path.exists():
        raise ConfigError(key, f"{path} is a file", "a folder")
    if text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        raise ConfigError(
            key, f"no such folder: {path}", "a folder relative to the working directory, or a hub id (org/name)"
        )
    return _download(text, needed, key)


def _download(hub_id: str, needed: str, key: str) -> Path:
    import huggingface_hub  # only where a hub id is used

    name, _, revision = hub_id.partition("@")
    try:
        download: Any = huggingface_hub.snapshot_download
        folder = Path(download(name, revision=revision or None, allow_patterns=_HUB_FILES))
    except Exception as error:  # noqa: BLE001 - the client raises its own errors, its HTTP library's and the system's
        first = (str(error).strip() or repr(error)).splitlines()[0]
        problem = f"no folder {hub_id!r} here, and the hub cannot provide it: {type(error).__name__}: {first}"
        raise ConfigError(key, problem, "a local folder, or a hub id while the hub is reachable") from None
    if not (folder / needed).is_file():
        raise ConfigError(key, f"{hub_id} on the hub has no {needed}", "a repository that holds it")
    return folder

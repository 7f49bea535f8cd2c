"""A cluster of the reference engine with plain ``vllm serve`` processes attached to it, on a tiny family; importing this skips without vLLM.

The servers are asked by the OpenAI client, as anybody's are. What they must answer says plain transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from cluster_harness import LiveCluster
from peft import PeftModel
from tiny_models import make_tiny, make_tiny_lora
from transformers import AutoModelForCausalLM
from vllm_bench import WIDE

from kvkin.tools.ports import free_ports
from kvkin.transport.messages import StatusReply

LAYERS, BLOCK, CHUNK = 4, 16, 64
BASE, TUNE = "base", "tune"
GROUP = (1, 3)
START_S, STOP_S, ANSWER_S = 300.0, 60.0, 90.0
ARGUMENTS = (
    "--enforce-eager",
    *("--dtype", "float32"),
    *("--max-model-len", "512"),
    *("--max-num-batched-tokens", "512"),
    *("--max-num-seqs", "8"),
    *("--block-size", "32"),
    *("--kv-cache-memory-bytes", str(1 << 26)),
)


def write_family(folder: Path) -> dict[str, Path]:
    """Checkpoints of two full fine-tunes that share no layer."""
    return {
        name: make_tiny("llama", folder / name, seed=seed, num_layers=LAYERS, **WIDE)
        for name, seed in ((BASE, 1), (TUNE, 2))
    }


def write_lora_family(folder: Path) -> tuple[Path, Path]:
    """The base's checkpoint, and an adapter of it that is the fine-tune."""
    checkpoint = make_tiny("llama", folder / BASE, seed=1, num_layers=LAYERS, **WIDE)
    return checkpoint, make_tiny_lora(checkpoint, folder / TUNE, range(LAYERS), seed=2)


def write_cluster(
    folder: Path,
    checkpoints: dict[str, Path],
    backend: str = "tcp",
    *,
    adapters: Mapping[str, Path] | None = None,
    attached: Mapping[str, Sequence[str]] | None = None,
    decode: Sequence[str] = (BASE,),
    answer_s: float = 15.0,
) -> Path:
    """A prefill node of the base and decode nodes on the reference engine, and attached servers: of each model one, or as ``attached`` says.

    ``adapters`` are members that are adapters of the base; whoever is asked has ``answer_s`` to answer.
    """
    adapters = adapters or {}
    attached = {f"vllm-{name}": [name] for name in checkpoints} if attached is None else attached
    client_port, node_port = free_ports(2)
    small = {"kv_bytes": "24MiB", "e_bytes": "8MiB", "port": 0}
    nodes: dict[str, Any] = {
        "router-0": {"role": "router", "client_port": client_port, "node_port": node_port},
        "prefill-0": {"role": "prefill", "models": [BASE], "threads": 1, **small},
        **{f"decode-{name}": {"role": "decode", "models": [name], "threads": 1, **small} for name in decode},
        **{name: {"role": "attached", "models": list(models), **small} for name, models in attached.items()},
    }
    base = str(checkpoints[BASE])
    family = {
        "base": BASE,
        "device": "cpu",
        "compute_dtype": "float32",
        "transition_layers": [GROUP[0]],
        "chunk_tokens": CHUNK,
        "recompute_groups": [{"receiver": TUNE, "group": list(GROUP)}],
        "models": {name: {"checkpoint": str(path)} for name, path in checkpoints.items()}
        | {name: {"checkpoint": base, "adapter": str(path)} for name, path in adapters.items()},
    }
    # what is held is worth pulling however fast the machine is, and nothing is ordered that no test asks for
    policy = {"bypass_tokens": 0, "min_reuse_tokens": BLOCK, "stream_overhead_s": 0.0, "min_order_tokens": 1 << 20}
    cluster = {
        "state_dir": str(folder / "state"),
        "families": {"tiny": family},
        "nodes": nodes,
        "router": {"policy": policy, "load_half_life_s": 1e-6},
        "drift": {"share": 0},
        "timeouts": {
            "heartbeat_s": 0.1,
            "node_dead_s": max(5.0, answer_s),
            "lease_s": 3,
            "lease_grace_s": 1,
            "pull_s": answer_s,
            "open_stream_s": answer_s,
            "plan_s": answer_s,
            "drain_s": 10,
            "start_s": 170,
        },
        "transport": {"backend": backend},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return file


class FamilyCluster(LiveCluster):
    """The nodes that kvkin starts; servers come and go."""

    def all_alive(self, status: StatusReply) -> bool:
        alive = {node.name for node in status.nodes if node.state == "alive"}
        return alive >= set(self.config.nodes) - {"router-0"} - set(self.config.attached)

    def attached(self, name: str, status: StatusReply) -> bool:
        return any(node.name == name and node.state == "alive" for node in status.nodes)


@contextlib.contextmanager
def family_cluster(file: Path) -> Iterator[FamilyCluster]:
    cluster = FamilyCluster(file)
    try:
        asyncio.run(cluster.processes.start())
        cluster.until(cluster.all_alive, "registered nodes")
        yield cluster
    finally:
        cluster.stop()


def transfer_config(file: Path, node: str, role: str = "kv_both", **extra: Any) -> str:
    """What a user writes after ``--kv-transfer-config``."""
    return json.dumps(
        {
            "kv_connector": "KvkinConnector",
            "kv_connector_module_path": "kvkin.engines.vllm.connector",
            "kv_role": role,
            "kv_connector_extra_config": {"config": str(file), "node": node, **extra},
        }
    )


@dataclass
class Answer:
    """``said`` is what kvkin says of the request."""

    token_ids: list[int]
    said: dict[str, Any]


class Server:
    """One ``vllm serve`` process and its children."""

    def __init__(
        self,
        checkpoint: Path,
        config: str,
        log: Path,
        arguments: Sequence[str] = (),
        common: Sequence[str] = ARGUMENTS,
    ) -> None:
        (self.port,) = free_ports(1)
        self.log = log
        command = [
            *_serve_command(checkpoint),
            "--served-model-name",
            "served",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        environment = {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *common, *arguments, "--kv-transfer-config", config],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._healthy():
            assert self.process.poll() is None, f"vllm serve ended:\n{self.text()[-6000:]}"
            assert time.monotonic() < deadline, f"not ready within {START_S:g} s:\n{self.text()[-3000:]}"
            threading.Event().wait(0.2)

    def ended(self) -> int:
        """Exit code of a server that ends by itself."""
        return self.process.wait(START_S)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def complete(
        self, token_ids: Sequence[int], max_tokens: int = 6, wishes: dict[str, Any] | None = None, **how: Any
    ) -> Answer:
        from openai import OpenAI

        body: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True, **how.pop("body", {})}
        if wishes is not None:
            body["kv_transfer_params"] = {"kvkin": wishes}
        timeout_s, model = how.pop("timeout_s", ANSWER_S), how.pop("model", "served")
        with OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(
                model=model,
                prompt=list(token_ids),
                max_tokens=max_tokens,
                temperature=0.0,
                extra_body=body,
                timeout=timeout_s,
                **how,
            )
        said = (answer.model_extra or {}).get("kv_transfer_params") or {}
        tokens = (answer.choices[0].model_extra or {})["token_ids"]
        return Answer(list(tokens), said.get("kvkin", {}))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        """Ctrl-C's way; whatever is left of it fails the test."""
        if self.process.poll() is not None:
            return
        children = self.children()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
            _, left = psutil.wait_procs(children, timeout=STOP_S)
        finally:
            for child in children:
                if child.is_running():
                    child.kill()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        assert not left, left


def _serve_command(checkpoint: Path) -> list[str]:
    """``vllm serve``; its CPU build has the same server, but its own command looks for a package of another name and ends."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    try:
        server.until_ready()
        yield server
    finally:
        server.stop()


class Plain:
    """Unmodified transformers, the reference for every answer; adapters of the base are merged by peft."""

    def __init__(self, checkpoints: dict[str, Path], adapters: Mapping[str, Path] | None = None) -> None:
        self.models = {name: _plain(path) for name, path in checkpoints.items()}
        for name, path in (adapters or {}).items():
            merged = PeftModel.from_pretrained(_plain(checkpoints[BASE]), str(path)).merge_and_unload()
            self.models[name] = merged.eval().requires_grad_(False)

    def answer(self, model: str, token_ids: Sequence[int], max_tokens: int = 6) -> list[int]:
        with torch.no_grad():
            out = self.models[model].generate(
                torch.tensor([list(token_ids)]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None
            )
        tokens: list[int] = out[0, len(token_ids) :].tolist()
        return tokens


def _plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """Token ids that no other seed begins with."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(token) for token in torch.randint(3, 320, (count,), generator=generator))

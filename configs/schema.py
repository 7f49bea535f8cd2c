"""The configuration of a cluster: one frozen typed tree, read once by ``configs.loader`` and passed in.

Every process of a cluster reads the same file. Names carry their unit (``_s`` seconds, ``_bytes``, ``_tokens``); byte sizes
may be written as "1GiB". Relative paths are relative to the working directory, ``~`` is expanded. Unknown keys are errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

# A size in bytes: an integer, or text such as "256MiB". The loader looks for this marker.
Bytes = Annotated[int, Meta(ge=0, le=2**60, extra={"size": True})]
# A duration in seconds; a year is as good as for ever, and keeps infinity out of timer arithmetic.
Seconds = Annotated[float, Meta(gt=0, le=366 * 86400)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
# A port that the file fixes.
Port = Annotated[int, Meta(ge=1, le=65535)]
# As Port, or 0: any free port, reported when the node starts and registers. For demos and tests; firewalls want a fixed one.
PortOrAny = Annotated[int, Meta(ge=0, le=65535)]
# What runs models.
EngineName = Literal["reference", "vllm"]
# Layer numbers count from 0.
Layer = Annotated[int, Meta(ge=0, le=10_000)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown keys refused."""


class ModelConfig(_Section, frozen=True, kw_only=True):
    """One member of a family: a full checkpoint, or a checkpoint with a LoRA adapter on it."""

    # Folder with config.json and safetensors, or a hub id such as org/name.
    checkpoint: str
    # Folder (or hub id) of a LoRA adapter in peft's format; none: the checkpoint as it is.
    adapter: str | None = None


class RecomputeGroup(_Section, frozen=True, kw_only=True):
    """Layers that a receiver recomputes when it reuses a sender's KV. Unprofiled: used under ``reuse: any`` only."""

    # Model name, or "*" for any member of the family.
    sender: str = "*"
    # Model name, or "*" for any member of the family.
    receiver: str = "*"
    # Half-open range of layers [start, stop). A start above 0 must be one of the family's transition_layers.
    group: tuple[Layer, Layer]


class FamilyConfig(_Section, frozen=True, kw_only=True):
    """One base model and its fine-tunes: same architecture and tokenizer."""

    # Name of the base model, a key of ``models``.
    base: str
    # Model name -> where its weights are. Model names are unique in the whole cluster.
    models: dict[str, ModelConfig]
    # How models run: ``reference`` is transformers, layer by layer; ``vllm`` is vLLM (docs/vllm.md). A node's own ``engine`` wins.
    engine: EngineName = "reference"
    # Arguments of vLLM's engine, by the names that the installed version's ``EngineArgs`` has, for the family's nodes that run on
    # it. null: vLLM's own default. What kvkin sets itself is refused (``configs/vllm_rules.py``).
    vllm: dict[str, Any] = {}
    # Where models run: auto takes CUDA if there is a device.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Type of activations, KV and E. auto: float32 on cpu, bfloat16 on cuda.
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Tokens per block: the unit of hashing, holding and transfer. Part of every block's hash.
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    # Layers whose entering hidden states (E) every node keeps, so that a recompute can start there. Ascending, above 0.
    transition_layers: tuple[Layer, ...] = ()
    # Most transition layers allowed: each costs E bytes per token on every node.
    max_transition_layers: Annotated[int, Meta(ge=0, le=16)] = 3
    # Longest prompt + answer in tokens; none: what the base's checkpoint says.
    max_context_tokens: Count | None = None
    # Tokens computed and pulled at once, a multiple of block_size. Smaller starts the pipeline earlier, larger computes faster.
    chunk_tokens: Count = 512
    # Recompute groups of pairs without a valid profile. The first entry that fits a (sender, receiver) pair counts.
    recompute_groups: tuple[RecomputeGroup, ...] = ()
    # Measured pairs: a folder whose *.json files ``kvkin profile`` wrote, or a list of such files. Profiles are used where their
    # models are unchanged, and only they admit approximate reuse under ``reuse: bounded``. None: no pair is profiled.
    profiles: str | tuple[str, ...] = ()
    # Milliseconds that a step of vLLM may wait for the last layers of a pulled context, on nodes where no other request runs. If they do
    # not come, the step was in vain. 0: contexts are complete before vLLM computes the rest of a prompt.
    sync_wait_ms: Annotated[float, Meta(ge=0, le=10_000)] = 0.0


class _Node(_Section, frozen=True, tag_field="role", kw_only=True):
    """What every role has."""

    # Address at which the others reach this node.
    host: str = "127.0.0.1"
    # Address that sockets are bound to, such as 0.0.0.0; none: host.
    bind: str | None = None

    @property
    def bind_host(self) -> str:
        """The address to bind to."""
        return self.host if self.bind is None else self.bind


class RouterNode(_Node, frozen=True, tag="router"):
    """The cluster's front: clients ask it, nodes register with it."""

    # Port for clients.
    client_port: Port = 5570
    # Port for nodes.
    node_port: Port = 5571


class PrefillNode(_Node, frozen=True, tag="prefill", kw_only=True):
    """Computes the KV of contexts once and serves it to decode nodes."""

    # Port at which peers open layer streams; 0: any free port.
    port: PortOrAny
    # Models whose contexts it computes, all of one family.
    models: tuple[str, ...]
    # Port of the data plane with backend tcp; 0: any free port. Firewalls want a fixed one.
    data_port: PortOrAny = 0
    # Host memory for KV blocks, registered at start.
    kv_bytes: Bytes = 1 << 30
    # Host memory for E blocks, registered at start.
    e_bytes: Bytes = 256 << 20
    # Compute threads; 0: as many as torch takes by itself.
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    # How this node runs its models; none: as its family says.
    engine: EngineName | None = None
    # Arguments of vLLM's engine for this node, each in place of the family's.
    vllm: dict[str, Any] = {}


class DecodeNode(_Node, frozen=True, tag="decode", kw_only=True):
    """Executes reuse plans and generates; serves the KV of its own contexts, too."""

    # Port at which peers open layer streams; 0: any free port.
    port: PortOrAny
    # Models that it answers for, all of one family.
    models: tuple[str, ...]
    # Port of the data plane with backend tcp; 0: any free port. Firewalls want a fixed one.
    data_port: PortOrAny = 0
    # Host memory for KV blocks, registered at start.
    kv_bytes: Bytes = 1 << 30
    # Host memory for E blocks, registered at start.
    e_bytes: Bytes = 256 << 20
    # Compute threads; 0: as many as torch takes by itself.
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    # How this node runs its models; none: as its family says.
    engine: EngineName | None = None
    # Arguments of vLLM's engine for this node, each in place of the family's.
    vllm: dict[str, Any] = {}
    # Requests that run interleaved; more wait in the queue.
    max_running: Count = 8


class AttachedNode(_Node, frozen=True, tag="attached", kw_only=True):
    """A plain ``vllm serve`` with kvkin's connector (docs/vllm.md): it takes requests from its own clients, reuses the family's KV
    for them and leaves its own to the family. kvkin does not start it; its engine arguments are on its command line."""

    # Port at which peers open layer streams; 0: any free port.
    port: PortOrAny
    # Models that it serves, all of one family: one checkpoint, and LoRA adapters of it.
    models: tuple[str, ...]
    # Port of the data plane with backend tcp; 0: any free port. Firewalls want a fixed one.
    data_port: PortOrAny = 0
    # Host memory for KV blocks, registered at start. Pulled KV lands here, and what others may pull lies here.
    kv_bytes: Bytes = 1 << 30
    # Host memory for E blocks, registered at start.
    e_bytes: Bytes = 256 << 20


NodeConfig = RouterNode | PrefillNode | DecodeNode | AttachedNode
WorkerNode = PrefillNode | DecodeNode


class PolicyConfig(_Section, frozen=True):
    """What the router weighs when it chooses a plan (cost = time to first token + beta x node-seconds - expected saving)."""

    # Price of one second of any node's time, in seconds of time to first token.
    beta: Annotated[float, Meta(ge=0, le=1000)] = 0.2
    # Half-life of the count of how many requests share a prefix, in seconds.
    fan_out_half_life_s: Seconds = 120.0
    # Fewer tokens than this are not pulled from another node but computed; a node's own blocks are used anyway.
    min_reuse_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 64
    # As min_reuse_tokens, and the larger of the two counts: below it the pipeline costs more than it saves.
    bypass_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 128
    # A request goes to another node once its best holder's estimated wait is longer than the next node's by this much.
    spill_s: Seconds = 2.0
    # Most segments of one plan.
    max_segments: Annotated[int, Meta(ge=1, le=1024)] = 16
    # Time to the first token that requests are to keep unless they say otherwise (``ttft_slo_s``); none: no target, the fastest
    # plan within a request's quality bound is taken. With a target: of the plans that keep it the one with the least loss.
    ttft_slo_s: Seconds | None = None
    # Share of its cost by which an approximate plan must be better than the best exact one.
    exact_preference: Annotated[float, Meta(ge=0, le=10)] = 0.1
    # Contexts with fewer tokens are never ordered from prefill nodes.
    min_order_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 256
    # Fewer expected later requests than this are no reason to order a prefill in the background.
    min_fan_out: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    # A prefill node with a longer queue, in seconds, gets no more orders.
    max_pool_queue_s: Seconds = 30.0
    # A request waits for a prefill that is ordered for it only if its first token then comes within this share of the time
    # that the best plan without it takes.
    live_margin: Annotated[float, Meta(gt=0, le=1)] = 0.7
    # What opening a stream to another node costs, in seconds.
    stream_overhead_s: Annotated[float, Meta(ge=0, le=60)] = 0.004
    # Length of context, in tokens, at which attention costs as much as the rest of a layer.
    context_half_tokens: Annotated[float, Meta(gt=0, le=1e9)] = 4096.0
    # Speed of a node that has not measured its own yet: tokens through one layer a second.
    default_layer_tokens_per_s: Annotated[float, Meta(gt=0, le=1e15)] = 10_000.0
    # Bandwidth of a node that has not measured its own yet: bytes pulled a second.
    default_pull_bytes_per_s: Annotated[float, Meta(gt=0, le=1e15)] = 1e9


class RouterConfig(_Section, frozen=True):
    """Settings of all routers."""

    # How plans are chosen.
    policy: PolicyConfig = PolicyConfig()
    # Most blocks that the prefix index knows; beyond it the least recently used leaves go.
    index_max_blocks: Count = 1_000_000
    # Tenant scope of every request until clients have keys. Part of every block's hash.
    scope: Annotated[str, Meta(min_length=1, max_length=64)] = "default"
    # Half-life of a node's load signal in seconds.
    load_half_life_s: Seconds = 5.0


class DriftConfig(_Section, frozen=True):
    """Watching reuse across models: a share of the requests that reuse another model's KV approximately runs once more,
    privately, on a decode node that has nothing else to do. A pair of models that leaves its bound is switched off."""

    # Share of those requests that is checked; 0: none. A check costs as much as a private prefill of its prompt.
    share: Annotated[float, Meta(ge=0, le=1)] = 0.02
    # First tokens of the answer that are compared.
    tokens: Annotated[int, Meta(ge=1, le=256)] = 8
    # How long a node must have had nothing to do before it begins a check. What arrives meanwhile goes first.
    idle_s: Seconds = 0.5
    # Checks that wait on one node, each with its prompt and one float per entry of the vocabulary; beyond it the oldest goes.
    max_pending: Annotated[int, Meta(ge=1, le=4096)] = 16
    # Checks of a pair before it may be switched off.
    min_samples: Count = 16
    # In the figures that are shown a check counts half as much as one that is so many checks younger.
    half_life_samples: Annotated[float, Meta(ge=1, le=1e6)] = 32.0
    # Most probability that a pair which keeps its bounds is ever switched off, however many checks there are.
    false_alarms: Annotated[float, Meta(gt=0, le=0.5)] = 0.01
    # Bound on the share of checks whose first token is the private one. None: what the pair's profile measured, less margin; a
    # pair without profile and without a bound is watched and never switched off.
    min_first_token: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Bound on the share of the first tokens that are the private ones, up to the first difference; none: no such bound.
    min_agreement: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Bound on the divergence of the first token's distribution, in nats; none: no such bound.
    max_divergence: Annotated[float, Meta(gt=0, le=20)] | None = None
    # See min_first_token.
    margin: Annotated[float, Meta(ge=0, le=1)] = 0.1
    # Whether nodes write the prompts of checked requests to state_dir/recorded, for kvkin profile --refresh. Prompts are private:
    # ask your users.
    record: bool = False
    # Most bytes that are kept of one pair's prompts on one host; the oldest go.
    record_bytes: Bytes = 16 << 20


class LimitsConfig(_Section, frozen=True):
    """Bounds on what one client may ask and on what may pile up. Beyond them a request gets a typed error."""

    # Longest prompt in tokens; the family's context bounds it as well.
    max_prompt_tokens: Count = 131_072
    # Most tokens that one request may generate.
    max_new_tokens: Count = 8192
    # Largest request message.
    max_request_bytes: Bytes = 8 << 20
    # Requests that may wait in the router and in each node.
    max_queue: Count = 256
    # Clients connected to one router.
    max_clients: Count = 4096
    # Stop strings of one request, and the length of each.
    max_stop_strings: Count = 16
    max_stop_chars: Count = 256


class TimeoutsConfig(_Section, frozen=True):
    """Deadlines. Everything that waits for somebody else has one."""

    # How often a node tells the router that it is alive, with its load.
    heartbeat_s: Seconds = 1.0
    # Silence after which a node counts as dead.
    node_dead_s: Seconds = 5.0
    # Life of a lease on blocks that are queued or being pulled; renewed at a third of it.
    lease_s: Seconds = 15.0
    # The producer recycles blocks this long after the lease ended, as the clocks of two hosts do not run alike.
    lease_grace_s: Seconds = 2.0
    # One transfer of KV or E.
    pull_s: Seconds = 20.0
    # Connect to a peer, handshake, open a layer stream.
    open_stream_s: Seconds = 5.0
    # A prefill order, from being sent until its last layer is there.
    order_s: Seconds = 120.0
    # How long a stopping node (router, prefill or decode) finishes what runs.
    drain_s: Seconds = 30.0
    # A whole request, unless the client sets a shorter deadline.
    request_s: Seconds = 600.0
    # An attached server's question for a plan; without an answer by then it computes the prompt itself.
    plan_s: Seconds = 2.0
    # A node's registration with the router, snapshot included.
    register_s: Seconds = 10.0
    # Start of a node: load weights, register memory.
    start_s: Seconds = 180.0


class TransportConfig(_Section, frozen=True):
    """The data plane, the same on all nodes."""

    # ucx: one-sided reads through shared memory or RDMA; tcp: plain sockets; inproc: one process (tests).
    backend: Literal["ucx", "tcp", "inproc"] = "ucx"
    # Allow addresses other than loopback although nothing is encrypted or authenticated yet.
    insecure: bool = False
    # Bytes per peer that abandoned transfers may still write to; at the cap the peer is disconnected.
    quarantine_max_bytes: Bytes = 256 << 20
    # Bytes in flight per layer stream.
    pull_window_bytes: Bytes = 64 << 20


class ClusterConfig(_Section, frozen=True, kw_only=True):
    """The whole file."""

    # Caches, logs and pid files.
    state_dir: str = ".kvkin"
    # Family name -> family.
    families: dict[str, FamilyConfig]
    # Node name -> node.
    nodes: dict[str, NodeConfig]
    router: RouterConfig = RouterConfig()
    drift: DriftConfig = DriftConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    transport: TransportConfig = TransportConfig()

    @property
    def state_path(self) -> Path:
        """``state_dir`` as a path."""
        return local_path(self.state_dir)

    @property
    def routers(self) -> dict[str, RouterNode]:
        return {name: node for name, node in self.nodes.items() if isinstance(node, RouterNode)}

    @property
    def prefill_nodes(self) -> dict[str, PrefillNode]:
        return {name: node for name, node in self.nodes.items() if isinstance(node, PrefillNode)}

    @property
    def decode_nodes(self) -> dict[str, DecodeNode]:
        return {name: node for name, node in self.nodes.items() if isinstance(node, DecodeNode)}

    @property
    def attached(self) -> dict[str, AttachedNode]:
        """Plain vLLM servers with kvkin's connector."""
        return {name: node for name, node in self.nodes.items() if isinstance(node, AttachedNode)}

    def family_of(self, model: str) -> str | None:
        """Name of the family that has ``model``; None if no family has it."""
        for name, family in self.families.items():
            if model in family.models:
                return name
        return None


def local_path(text: str) -> Path:
    """A path of the configuration: ``~`` expanded, relative to the working directory."""
    return Path(text).expanduser()

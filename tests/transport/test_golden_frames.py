"""Frames that were once sent must stay readable, and plain MessagePack must read the ones of today.

``golden/*.json`` hold one frame of every message type, in hex. ``python tests/transport/test_golden_frames.py`` writes those
of new message types; a frame that is there is never rewritten, for it stands for an older peer.
"""

from __future__ import annotations

import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from kvkin.kv.layout import KVLayout, Plane
from kvkin.kv.lineage import Lineage
from kvkin.kv.plan import Holder, LayerGroup, LayerSource, PlanKind, ReusePlan, Segment, TokenRows
from kvkin.kv.provenance import Provenance, Quality
from kvkin.transport import codec, messages, node_messages, stream_messages
from kvkin.transport.data_plane import RegionAddress

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"

FAMILIES: dict[str, tuple[Any, ...]] = {
    "client": typing.get_args(messages.ClientRequest) + typing.get_args(messages.ClientReply),
    "node": typing.get_args(node_messages.NodeToRouter) + typing.get_args(node_messages.RouterToNode),
    "stream": typing.get_args(stream_messages.ConsumerToHolder) + typing.get_args(stream_messages.HolderToConsumer),
}
CODECS = {
    "client": (codec.client_requests(), codec.client_replies()),
    "node": (codec.node_to_router(), codec.router_to_node()),
    "stream": (codec.consumer_to_holder(), codec.holder_to_consumer()),
}
TYPES = [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds]


def tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


def samples() -> dict[str, msgspec.Struct]:
    """One message of every type, with as few defaults as possible."""
    lineage = Lineage((b"h" * 16, b"i" * 16), (b"k" * 16,))
    exact = Provenance(b"l" * 16, b"l" * 16)
    tainted = Provenance(b"t" * 16, b"l" * 16, 0.25, b"l" * 16, 32, True)
    holder = Holder("prefill-0", exact, "order-1")
    plan = ReusePlan(
        (
            Segment(
                0, 32, (LayerSource(LayerGroup(0, 1), holder),), 0, 1, holder, LayerGroup(1, 2), PlanKind.PARTIAL, 0.02
            ),
            Segment(
                32,
                48,
                (LayerSource(LayerGroup(0, 2), holder),),
                64,
                None,
                None,
                TokenRows((33, 40)),
                PlanKind.TOKEN_WISE,
            ),
            Segment(48, 50),
        ),
        "the reason",
    )
    sampling = messages.Sampling(0.5, 0.9, 40, 7, ("\n\n",), 64, 2, True)
    logprobs = (messages.TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.5))),)
    timings = messages.Timings(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    segment = messages.SegmentReport(0, 32, PlanKind.PARTIAL, ("prefill-0",), 1, (1, 2), 32, 1, 4096)
    report = messages.ReuseReport(
        PlanKind.PARTIAL,
        Quality.BOUNDED,
        0.02,
        (segment,),
        ("prefill-0",),
        32,
        1,
        4096,
        "cheaper",
        "lease over",
        PlanKind.EXACT,
    )
    load = messages.NodeLoad(1, 2, 3, 4, 5, 6, 7, 8, 9, 10.5, 11.5, 12, 13, 14)
    layout = KVLayout(2, (Plane("keys", 2, 16), Plane("values", 2, 16)), 64, "float32", 16)
    served = node_messages.ServedModel("qa", "tiny", lineage, b"d" * 16)
    held = node_messages.Holding(b"b" * 16, b"a" * 16, 0, 16, 2, (1,))
    status = messages.NodeStatus("decode-0", "decode", "alive", "inc", ("qa",), load, 3, 0.5)
    chat = (messages.ChatMessage("user", "grüß dich"),)
    region = RegionAddress("ucx", 1, 4096, b"meta")
    drifted = node_messages.DriftSource(b"s" * 16, "base", PlanKind.PARTIAL, (1, 2))
    found: list[msgspec.Struct] = [
        messages.Generate("1", "qa", None, None, chat, sampling, False, messages.Reuse.ANY, 0.1, False, 3.0, 5.0),
        messages.Cancel("1"),
        messages.ListModels("2"),
        messages.AskStatus("3"),
        messages.Ping("4", ("1",)),
        messages.Accepted("1", "r-1", 50),
        messages.Pong("4", "router-0", "inc"),
        messages.Tokens("1", 0, (7,), "yes", logprobs),
        messages.Finished("1", "yes", (7,), "stop", messages.Usage(50, 1, 32), timings, report, logprobs, "decode-0"),
        messages.Error("1", "capacity", "full", True),
        messages.Models("2", (messages.ModelEntry("qa", "tiny", 512, ("decode-0",)),)),
        messages.StatusReply("3", "router-0", 1.5, 1, (status,), 9, {"requests": 2}),
        node_messages.Register(1, "decode-0", "decode", "inc", "tcp://127.0.0.1:1", (served,), layout, (1,)),
        node_messages.Holdings("inc", 3, (exact, tainted), (held,), ((b"c" * 16, 1),), 2, 1, False),
        node_messages.Heartbeat("inc", load, True),
        node_messages.Generated("r-1", 0, (7,), "yes", logprobs),
        node_messages.Done("r-1", "yes", (7,), "stop", timings, report, logprobs),
        node_messages.Failed("r-1", "capacity", "full", True),
        node_messages.OrderDone("order-1", 48, 16, 0.5),
        node_messages.DriftSample("r-1", b"l" * 16, (drifted,), True, 0.75, 0.25, 8, True),
        node_messages.AskPlan("q-1", "qa", (1, 2, 3), messages.Reuse.ANY, 0.1, False, 2.0, 5.0),
        node_messages.PlanDone("q-1", 50, 32, "lease over"),
        node_messages.Leave("inc"),
        node_messages.Registered("router-0", "inc", 1.0),
        node_messages.Refused("lineage", "other weights"),
        node_messages.SnapshotWanted(True),
        node_messages.Execute(
            "r-1", "qa", (1, 2, 3), b"r" * 16, plan, sampling, False, 5.0, {"prefill-0": "tcp://127.0.0.1:2"}, 1.5, 0.5
        ),
        node_messages.Abort("r-1", "cancelled"),
        node_messages.PrefillOrder("order-1", "base", (1, 2, 3), b"r" * 16, 60.0, True),
        node_messages.Planned("q-1", b"r" * 16, plan, {"prefill-0": "tcp://127.0.0.1:2"}),
        node_messages.PlanRefused("q-1", "unknown_model", "not here"),
        node_messages.Drain(),
        stream_messages.OpenStream(
            1, "s-1", "decode-0", 0, b"y" * 16, b"p" * 16, (b"b" * 16,), 16, (0, 1), 1, 4, "order-1", 2.0
        ),
        stream_messages.StreamOpened("s-1", "inc", 15.0, region, 8, 4096, (3, 4), (5,), 9, lineage, ((0, 0), (0, -1))),
        stream_messages.StreamRefused("s-1", "source_refused", "not there"),
        stream_messages.LayerReady("s-1", ((1, 0), (1, -1))),
        stream_messages.StreamLost("s-1", "lease_expired", "too late"),
        stream_messages.RenewLease("s-1"),
        stream_messages.LeaseRenewed("s-1", 15.0),
        stream_messages.CloseStream("s-1", 9),
        stream_messages.StreamClosed("s-1", True),
    ]
    return {tag(type(message)): message for message in found}


def later_samples() -> dict[str, msgspec.Struct]:
    """Client messages with the fields that were added since, under the name of their golden frame."""
    found = samples()
    inputs = messages.DecisionInputs(
        0.05,
        0.5,
        0.25,
        0.125,
        1e9,
        4e4,
        (
            messages.Alternative("decode-0", PlanKind.PARTIAL, (1, 2), 0.02, 0.25, ("prefill-0",), True),
            messages.Alternative("decode-0", PlanKind.PARTIAL, None, None, 0.1, ("prefill-0",)),
            messages.Alternative("decode-1", PlanKind.PRIVATE, None, 0.0, 2.0, ()),
        ),
    )
    generate, finished = found["generate"], found["finished"]
    assert isinstance(generate, messages.Generate)
    assert isinstance(finished, messages.Finished)
    report = msgspec.structs.replace(finished.report, inputs=inputs)
    counted = msgspec.structs.replace(finished.report, tokens_cached=16, tokens_loaded=16, tokens_computed=18)
    return {
        "generate ttft_slo_s": msgspec.structs.replace(generate, reuse=messages.Reuse.OWN, ttft_slo_s=0.5),
        "finished inputs": msgspec.structs.replace(finished, report=report),
        "finished tokens_cached": msgspec.structs.replace(finished, report=counted),
    }


def golden(family: str) -> dict[str, bytes]:
    file = GOLDEN / f"{family}.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: bytes.fromhex(frame) for name, frame in content.items()}


def decode(family: str, frame: bytes) -> Any:
    problems = []
    for one in CODECS[family]:
        try:
            return one.decode(frame)  # type: ignore[attr-defined]
        except codec.ProtocolError as error:
            problems.append(str(error))
    raise AssertionError(problems)


def plain(message: Any) -> Any:
    """What plain MessagePack makes of a message: maps, arrays, strings, numbers and bytes."""
    return msgpack.unpackb(codec.encode(message), strict_map_key=False)


def as_old(new: Any, old: Any) -> Any:
    """``new`` without the fields that were added since ``old``, at whatever depth."""
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: as_old(value, old[key]) for key, value in new.items() if key in old}
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return [as_old(*pair) for pair in zip(new, old, strict=True)]
    return new


@pytest.mark.parametrize(("family", "kind"), TYPES, ids=lambda one: one if isinstance(one, str) else tag(one))
def test_a_golden_frame_still_means_what_it_meant(family: str, kind: Any) -> None:
    frame = golden(family).get(tag(kind))
    assert frame is not None, f"{kind.__name__} has no golden frame: run python {Path(__file__).name}"
    assert decode(family, frame) == samples()[tag(kind)]


@pytest.mark.parametrize(("family", "kind"), TYPES, ids=lambda one: one if isinstance(one, str) else tag(one))
def test_plain_messagepack_reads_golden_and_todays_frames_alike(family: str, kind: Any) -> None:
    old, new = msgpack.unpackb(golden(family)[tag(kind)]), plain(samples()[tag(kind)])
    assert old["type"] == new["type"] == tag(kind)
    missing = {key: value for key, value in old.items() if key not in new}
    assert missing == {}, "a field that older peers read is gone"
    assert as_old(new, old) == old


@pytest.mark.parametrize("name", later_samples())
def test_golden_frames_of_later_fields(name: str) -> None:
    message, frame = later_samples()[name], golden("client")[name]
    assert decode("client", frame) == message
    old, new = msgpack.unpackb(frame), plain(message)
    assert as_old(new, old) == old


@pytest.mark.parametrize("kind", [messages.DecisionInputs, messages.Alternative, messages.ReuseReport])
def test_the_document_names_every_field_of_a_report(kind: Any) -> None:
    words = set(re.findall(r"[a-z0-9_]+", DOCUMENT.read_text(encoding="utf-8")))
    assert {field.encode_name for field in msgspec.structs.fields(kind)} <= words


@pytest.mark.parametrize(("family", "kind"), TYPES, ids=lambda one: one if isinstance(one, str) else tag(one))
def test_unknown_fields_are_ignored(family: str, kind: Any) -> None:
    content = plain(samples()[tag(kind)]) | {"from_the_future": [1, {"a": b"b"}]}
    assert decode(family, msgpack.packb(content)) == samples()[tag(kind)]


@pytest.mark.parametrize(("family", "kind"), TYPES, ids=lambda one: one if isinstance(one, str) else tag(one))
def test_fields_with_a_default_may_be_left_out(family: str, kind: Any) -> None:
    fields = msgspec.structs.fields(kind)
    required = {field.encode_name for field in fields if field.required}
    content = {key: value for key, value in plain(samples()[tag(kind)]).items() if key in required | {"type"}}
    assert isinstance(decode(family, msgpack.packb(content)), kind)


@pytest.mark.parametrize(("family", "kind"), TYPES, ids=lambda one: one if isinstance(one, str) else tag(one))
def test_the_document_names_every_message_and_field(family: str, kind: Any) -> None:
    words = set(re.findall(r"[a-z0-9_]+", DOCUMENT.read_text(encoding="utf-8")))
    names = {tag(kind), *(field.encode_name for field in msgspec.structs.fields(kind))}
    assert names <= words, f"docs/protocol.md says nothing of {sorted(names - words)}"


def write() -> None:
    for family, kinds in FAMILIES.items():
        frames = golden(family)
        for kind in kinds:
            frames.setdefault(tag(kind), codec.encode(samples()[tag(kind)]))
        if family == "client":
            for name, message in later_samples().items():
                frames.setdefault(name, codec.encode(message))
        content = {name: frame.hex() for name, frame in frames.items()}
        (GOLDEN / f"{family}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())

"""``kvkin ask --local``: a cluster in one process, every kind of plan, and the very tokens of plain transformers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_cluster import BASE, FULL, LAYERS, SPLIT, UPPER, make_cluster

from kvkin.configs.families import resolve_cluster
from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError, UnknownModel
from kvkin.kv.plan import PlanKind
from kvkin.kv.provenance import Quality
from kvkin.tools import demo_reference
from kvkin.tools.ask import Ask
from kvkin.tools.cli import main
from kvkin.tools.local import LocalCluster
from kvkin.transport.messages import Finished

# about a token a letter with the tiny tokenizer
CONTEXT = (
    "The keeper of the lamp wrote down every ship that passed, the weather, and the birds that struck the glass. " * 3
)
MAX_TOKENS = 8
WAIT_S = 60.0


def reference(config_file: Path, asked: list[tuple[str, str, Finished]]) -> list[list[int]]:
    """Tokens of plain transformers for (model, prompt, answer), each by the segments that the answer reports."""
    config = load_cluster(config_file)
    family = resolve_cluster(config).families["tiny"]
    holds = {name: node.models[0] for name, node in (config.prefill_nodes | config.decode_nodes).items()}
    requests: list[dict[str, Any]] = []
    for model, prompt, answer in asked:
        segments = [
            {
                "start": segment.start,
                "stop": segment.stop,
                "kind": segment.kind.value if segment.sources else "computed",
                "group": segment.group,
                "holder": holds[segment.sources[0]] if segment.sources else "",
            }
            for segment in answer.report.segments
        ]
        requests.append(
            {
                "model": model,
                "messages": None,
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "eos": sorted(family.models[model].eos_ids),
                "quality": answer.report.quality.value,
                "segments": segments,
            }
        )
    models = {
        name: {"checkpoint": str(model.path), "adapter": str(model.adapter_path or "")}
        for name, model in family.models.items()
    }
    spec = {"tokenizer": str(family.tokenizer_path), "models": models, "requests": requests}
    return [answer["tokens"] for answer in demo_reference.run(spec)]


async def test_every_kind_of_plan_and_the_tokens_of_plain_transformers(tmp_path: Path) -> None:
    file = make_cluster(tmp_path)
    asked: list[tuple[str, str, Finished]] = []
    threads = set(threading.enumerate())
    async with LocalCluster(load_cluster(file)) as cluster:

        async def ask(model: str, question: str, **request: Any) -> Finished:
            prompt = CONTEXT + question
            answer = await cluster.client.generate(
                model, prompt=prompt, max_tokens=MAX_TOKENS, timeout_s=WAIT_S, **request
            )
            asked.append((model, prompt, answer))
            return answer

        private = await ask(BASE, "Who wrote it down?")
        assert private.report.kind is PlanKind.PRIVATE
        assert private.report.quality is Quality.EXACT

        exact = await ask(BASE, "What was written down?")
        assert exact.report.kind is PlanKind.EXACT
        assert exact.report.sources == ("decode-base",)
        assert exact.report.bytes_pulled == 0, "its own blocks are used where they lie"

        shared = await ask(UPPER, "And the birds?", reuse="exact")
        assert shared.report.kind is PlanKind.SHARED_PREFIX
        assert shared.report.quality is Quality.EXACT
        assert shared.report.layers_recomputed == LAYERS - SPLIT
        assert shared.report.segments[0].e_layer == SPLIT
        assert shared.report.bytes_pulled > 0

        partial = await ask(FULL, "Which ships?", reuse="any")
        assert partial.report.kind is PlanKind.PARTIAL
        assert partial.report.quality is Quality.UNPROFILED
        assert partial.report.segments[0].group == (2, 5)

        off = await ask(FULL, "Which ships?", reuse="off", publish=False)
        assert off.report.kind is PlanKind.PRIVATE
        assert not any(answer.report.fallback for _, _, answer in asked)
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    # asyncio keeps its worker threads until the loop ends, tqdm its monitor for ever
    assert [name for name in left if not name.startswith(("asyncio_", "Thread-", "tqdm"))] == []
    expected = reference(file, asked)
    assert [list(answer.token_ids) for _, _, answer in asked] == expected


def test_ask_local_with_a_warm_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_cluster(tmp_path)
    context = tmp_path / "context.txt"
    context.write_text(CONTEXT)
    options = ["--config", str(file), "--context-file", str(context), "--reuse", "any", "--max-tokens", "4"]
    assert main(["ask", "--local", "--warm", BASE, FULL, "Who?", *options]) == 0
    out = capsys.readouterr().out
    warm, rest = out.split("\n", 1)
    assert warm.startswith("private prefill of")
    assert "partial reuse (unprofiled) on decode-full" in rest
    assert "layers [2, 5) from E 2" in rest
    assert "hash" in rest
    assert "recompute" in rest


def test_ask_local_says_what_the_decision_went_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_cluster(tmp_path)
    options = ["--config", str(file), "--reuse", "any", "--max-tokens", "4", "--raw", "--slo", "30", "--verbose"]
    assert main(["ask", "--local", "--warm", BASE, FULL, CONTEXT, *options]) == 0
    out = capsys.readouterr().out
    assert "(target 30.000 s)" in out
    assert "weighed" in out
    assert "private (chosen)" in out, "computing is in time, and loses nothing"
    # the unprofiled group was weighed as well
    assert "[2, 5)" in out


def test_ask_local_with_its_own_blocks_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_cluster(tmp_path)
    options = ["--config", str(file), "--reuse", "own", "--max-tokens", "4", "--raw", "--json"]
    assert main(["ask", "--local", "--warm", BASE, UPPER, CONTEXT, *options]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["kind"], report["bytes_pulled"]) == ("private", 0)
    assert report["inputs"]["considered"][0]["chosen"] is True


def test_ask_local_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_cluster(tmp_path, models=(BASE,))
    assert main(["ask", "--local", BASE, "Hello", "--raw", "--config", str(file), "--max-tokens", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == BASE
    assert answer["report"]["kind"] == "private"
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] == 5


async def test_a_model_that_the_cluster_does_not_have_is_named(tmp_path: Path) -> None:
    config = load_cluster(make_cluster(tmp_path, models=(BASE,)))
    with pytest.raises(UnknownModel, match=r"no model 'tiny-bas' .*tiny-base, tiny-full, tiny-upper"):
        LocalCluster(config, ["tiny-bas"])
    with pytest.raises(ConfigError, match="no decode node serves tiny-full"):
        LocalCluster(config, [FULL])


async def test_a_node_that_cannot_start_ends_the_local_cluster(tmp_path: Path) -> None:
    file = make_cluster(tmp_path, models=(BASE,))
    (tmp_path / "base" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"families\.tiny\.models\.tiny-base"):
        async with LocalCluster(load_cluster(file)):
            pass


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"context_file": Path("no/such.txt")}, r"--context-file: cannot read no/such\.txt: No such file"),
        ({"local": True, "address": "tcp://x:1"}, "--local: given together with --address"),
        ({"config": Path("a.yaml"), "address": "tcp://x:1"}, "--address: given together with --config"),
    ],
)
def test_what_cannot_be_asked_is_said(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Ask("m", "q", **options).run()


def test_the_prompt_is_context_then_question(tmp_path: Path) -> None:
    file = tmp_path / "c.txt"
    file.write_text("Some context.\n")
    assert Ask("m", "Why?", context_file=file).request()["messages"] == [("user", "Some context.\n\nWhy?")]
    assert Ask("m", "Why?", context_file=file, raw=True).request()["prompt"] == "Some context.\nWhy?"
    assert Ask("m", "Why?").request()["messages"] == [("user", "Why?")]
    asked = Ask("m", "Why?", reuse="own", slo=0.5, max_loss=0.02).request()
    assert (asked["reuse"], asked["ttft_slo_s"], asked["max_loss"]) == ("own", 0.5, 0.02)

"""LoRA models of a plain vLLM server: units of a plan run before vLLM has put their adapter into a slot, on one rank and on two."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
from engine_harness import computed, contexts, partial, plan_of, prompt
from serving_bench import CONTEXT, TOTAL, Bench, Built, built_server, fresh_bench
from vllm_bench import Family, lora_family

from kvkin.engines.vllm import compat
from kvkin.engines.vllm.serving import Published, Question, StoreWanted
from kvkin.kv.plan import ReusePlan, private_plan

cloudpickle = pytest.importorskip("cloudpickle", reason="it comes with vLLM")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

IDS = {"sender": 1, "other": 2, "upper": 3}
MIDDLE = plan_of(partial(0, CONTEXT, (1, 3), "receiver"), computed(CONTEXT, TOTAL))
LOWEST = plan_of(partial(0, CONTEXT, (0, 2), "receiver"), computed(CONTEXT, TOTAL))

# the ranks cannot import this module
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return lora_family("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def built(request: Any, family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Two slots; of three adapters one is the server's."""
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "tensor_parallel_size": request.param}
    with built_server(family, tmp_path_factory.mktemp("cluster"), ["sender"], **options) as built:
        yield built


@pytest.fixture
def bench(built: Built) -> Iterator[Bench]:
    with fresh_bench(built) as bench:
        for number in IDS.values():
            bench.llm.remove_lora(number)
        yield bench


def lora(family: Family, name: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, IDS[name], str(family.members[name]))


def private(family: Family, name: str, tokens: tuple[int, ...], count: int = 5) -> list[int]:
    model = family.models[name]
    return oracle.generate(model, oracle.private(model, tokens), count)[1]


def planned(family: Family, name: str, tokens: tuple[int, ...], plan: ReusePlan, seed: int) -> list[int]:
    model, held = family.models[name], contexts(family.name, TOTAL, seed)["receiver"].head(CONTEXT)
    return oracle.generate(model, oracle.execute(model, tokens, plan, {"receiver": held}), 5)[1]


def answering(bench: Bench, family: Family, plan: ReusePlan, seed: int) -> None:
    """The link has ``plan`` for the next question of ``sender``, and private ones for all others."""
    held = {"receiver": contexts(family.name, TOTAL, seed)["receiver"].head(CONTEXT)}

    def answer(question: Question) -> None:
        if question.model == "sender":
            bench.link.plan(question.key, plan)
            bench.link.bring(question.key, plan, held)
        else:
            bench.link.plan(question.key, private_plan(len(question.token_ids)))

    bench.link.answer = answer


@pytest.mark.parametrize("plan", [MIDDLE, LOWEST], ids=["middle", "lowest"])
def test_units_of_an_adapter_that_vllm_never_loaded(bench: Bench, family: Family, plan: ReusePlan) -> None:
    tokens = prompt(TOTAL, 1)
    answering(bench, family, plan, 1)
    expected = planned(family, "sender", tokens, plan, 1)
    assert expected != private(family, "sender", tokens), "the test would not notice"
    assert bench.tokens(tokens, lora=lora(family, "sender")) == expected
    assert [one[1:] for one in bench.link.over] == [(CONTEXT, "")]


def test_units_of_an_adapter_while_others_have_all_slots(bench: Bench, family: Family) -> None:
    """What they displace, from its slot and from memory, is in place again for the batch that runs on."""
    answering(bench, family, MIDDLE, 2)
    short = {name: prompt(30, number) for name, number in IDS.items() if name != "sender"}
    for name, tokens in short.items():
        bench.add(tokens, max_tokens=40, lora=lora(family, name))
    bench.run(until=lambda outputs: len([one for one in outputs if one.outputs[0].token_ids]) == len(short))
    tokens = prompt(TOTAL, 2)
    key = bench.add(tokens, lora=lora(family, "sender"))
    assert all(sorted(slots) == [IDS[name] for name in short] for slots in bench.llm.collective_rpc(_slots))
    finished = bench.run()
    answers = [list(finished[f"r{number}"].outputs[0].token_ids) for number in (1, 2, 3)]
    assert answers[:2] == [private(family, name, tokens, 40) for name, tokens in short.items()]
    assert answers[2] == planned(family, "sender", tokens, MIDDLE, 2)
    assert (key, CONTEXT, "") in bench.link.over


def test_an_adapter_that_a_rank_cannot_load_costs_the_plan(bench: Bench, family: Family) -> None:
    """On one rank only: no unit begins on any."""
    tokens = prompt(TOTAL, 3)
    answering(bench, family, MIDDLE, 3)
    bench.llm.collective_rpc(_hold, args=(False,))
    try:
        bench.add(tokens, lora=lora(family, "sender"))
        (output,) = bench.run().values()
    finally:
        bench.llm.collective_rpc(_hold, args=(True,))
    assert list(output.outputs[0].token_ids) == private(family, "sender", tokens)
    ((_, reused, fallback),) = bench.link.over
    assert reused == 0
    assert fallback == "the adapter cannot be loaded: OSError: no such disk"
    assert output.kv_transfer_params["kvkin"]["fallback"] == fallback


def test_an_abort_of_who_holds_an_adapter_leaves_nothing(bench: Bench, family: Family) -> None:
    answering(bench, family, MIDDLE, 4)
    key = bench.add(prompt(TOTAL, 4), lora=lora(family, "sender"))
    bench.step()
    assert held(bench) == {1}
    bench.llm.abort_request([key], internal=True)
    bench.run()
    assert [one[0] for one in bench.link.over] == [key]
    assert held(bench) == {0}


def held(bench: Bench) -> set[int]:
    """How many adapters the ranks hold."""
    with compat.active(compat.current_connector()):
        return set(bench.llm.collective_rpc(_num_held))


def test_nothing_is_published_once_rows_may_have_got_anothers_adapter(bench: Bench, family: Family) -> None:
    """vLLM's CPU kernels give rows without an adapter that of the last slot."""
    answering(bench, family, MIDDLE, 5)
    for name in ("other", "upper"):
        bench.tokens(prompt(30, IDS[name]), lora=lora(family, name))
    bench.link.publish = lambda key: bench.link.events.append(StoreWanted(key, 7, 0, (1,), (0,)))
    key = bench.add(prompt(TOTAL, 5))
    bench.run(until=lambda _: 7 in bench.link.stores)
    assert "--max-loras" in bench.link.stores[7]
    bench.link.events.append(Published(key))


def _slots(worker: Any) -> list[int | None]:
    return list(worker.get_model().lora_manager.lora_index_to_id)


def _hold(worker: Any, works: bool) -> None:
    """On the last rank, have ``Adapters.hold`` fail or work again."""
    from kvkin.engines.vllm import adapters

    if worker.rank != worker.parallel_config.world_size - 1:
        return
    if works:
        adapters.Adapters.hold = worker.kvkin_hold  # type: ignore[method-assign]
        return

    def fail(self: Any, order: Any) -> None:
        raise OSError("no such disk")

    worker.kvkin_hold, adapters.Adapters.hold = adapters.Adapters.hold, fail  # type: ignore[method-assign]


def _num_held(worker: Any) -> int:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return len(connector.worker_side.runner.adapters._held)

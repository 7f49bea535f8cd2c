"""The engine on a device that is through later than the call: nothing is said, and no load counts as received, before it is.

The worker has the lane of a CUDA device over ``FakeCuda``: everything is computed at once, and said when that device has come so far, which
is when the test lets it, or when somebody waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import check_engine_steps as steps
import numpy as np
import oracle
import pytest
from check_engine import GEOMETRIES, SHAPES, Tally, assert_tokens, run_tiny
from check_engine_steps import CONTEXT_CHUNKS, PARTIAL, PRIVATE, TOTAL, Run
from engine_harness import (
    NUM_LAYERS,
    TAPS,
    computed,
    contexts,
    exact,
    greedy,
    plan_of,
    run_until_idle,
    step_until,
    token_wise,
)
from fake_cuda import FakeCuda, FakeStream
from vllm_bench import SharedEngine, lora_family
from vllm_checks import ONE_OF_EACH, check_batch, check_batch_in_pieces, check_leaves_nothing

from kvkin.engines.vllm import worker_side
from kvkin.engines.vllm.cuda_lane import CudaLane
from kvkin.engines.vllm.entries import PARAMETER, Entry
from kvkin.engines.vllm.loads import Load
from kvkin.engines.vllm.orders import Forget, ReleaseBlocks, Serve, StoreE, StoreKV, is_slice
from kvkin.engines.vllm.rank_memory import RankMemory
from kvkin.engines.vllm.reports import SliceTook
from kvkin.engines.vllm.scheduler_side import MAX_SLICES_OUT, SchedulerSide
from kvkin.kv.errors import Cancelled
from kvkin.kv.pulls import E_LAYER
from kvkin.transport.arena import Arena

pytestmark = pytest.mark.vllm

LONG = plan_of(computed(0, 9))
"""Of a request that goes on decoding, so that steps are not idle."""


class Late:
    """A shared engine, and the device of its worker."""

    def __init__(self, shared: SharedEngine, cuda: FakeCuda) -> None:
        self.shared, self.cuda = shared, cuda

    def run(self) -> Run:
        self.cuda.source = None
        return Run(self.shared.make, self.shared.family.name)

    @property
    def work(self) -> FakeStream:
        """Where the slices are."""
        return self.cuda.streams[1]

    def busy(self, run: Run, name: str = "busy") -> None:
        """A request decodes, and the device does its forwards only."""
        run.submit(name, LONG, seed=9, sampling=greedy(200, logprobs=None), taps=())
        step_until(run.bench, lambda: len(run.recorder.of(name).tokens) >= 2)

    def steps(self, run: Run, count: int) -> None:
        for _ in range(count):
            run.bench.step()
            self.cuda.run(self.cuda.main)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Late]:
    cuda = FakeCuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_side, "lane_for", lambda *_: CudaLane(cuda, overlap=True))  # type: ignore[arg-type]
        shared = SharedEngine(lora_family("llama", tmp_path_factory.mktemp("family")))
    yield Late(shared, cuda)
    shared.close()


@pytest.fixture
def by_itself(late: Late) -> Iterator[SharedEngine]:
    """The device makes some progress whenever it is asked."""
    late.cuda.source = random.Random(3)
    yield late.shared
    late.cuda.source = None


# --- the contract -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_plan_shape(by_itself: SharedEngine, shape: str) -> None:
    tally = Tally()
    run_tiny(by_itself.make, by_itself.family.name, shape, GEOMETRIES[1], tally, 0)
    tally.close()


@pytest.mark.parametrize("phase", steps.PHASES)
def test_cancel_and_replan(by_itself: SharedEngine, phase: str) -> None:
    steps.check_cancel(by_itself.make, by_itself.family.name, phase)
    steps.check_replan(by_itself.make, by_itself.family.name, phase)


@pytest.mark.parametrize("phase", ["queued", "computing", "decoding"])
def test_what_ends_early_leaves_nothing(by_itself: SharedEngine, phase: str) -> None:
    check_leaves_nothing(by_itself, phase)


def test_batches(by_itself: SharedEngine) -> None:
    check_batch(by_itself, ONE_OF_EACH, 6)
    models = ["receiver"] * len(ONE_OF_EACH)
    check_batch_in_pieces(by_itself, ONE_OF_EACH, models)


# --- when what is said ------------------------------------------------------------------------------------------------------


def test_nothing_is_said_before_the_device_is_through_and_nobody_waits_for_it(late: Late) -> None:
    run = late.run()
    late.busy(run)
    run.feed("r", run.data("r", run.submit("r")))
    before, waited = len(run.recorder.of("busy").tokens), len(late.cuda.waited)
    slices = 0
    for _ in range(12):
        late.steps(run, 1)
        slices += is_slice(late.shared.runtime.scheduler.last.orders)
    assert slices == MAX_SLICES_OUT
    assert run.units("r") == set()
    assert not run.recorder.of("r").prefilled
    assert len(run.recorder.of("busy").tokens) == before + 12, "the others of the batch go on"
    assert late.work not in {stream for stream, _ in late.cuda.waited[waited:]}
    late.cuda.source = random.Random(0)
    run_until_idle(run.bench)
    run.assert_result("r")
    recomputed = [(unit.chunk, unit.layer) for unit in run.recorder.of("r").units if unit.recompute]
    assert recomputed == [(chunk, layer) for chunk in CONTEXT_CHUNKS for layer in (1, 2)]


def test_a_load_is_received_once_its_last_piece_is_there(late: Late) -> None:
    """A load that only pulls: written in one slice, and its request computes nothing until that is done."""
    run = late.run()
    late.busy(run)
    plan = plan_of(exact(0, 8, "twin"), computed(8, 20))
    run.feed("r", run.data("r", run.submit("r", plan)))
    late.steps(run, 6)
    assert not run.recorder.of("r").prefilled
    (entry,) = [each for each in late.shared.runtime.scheduler.entries.values() if each.load.stop]
    assert entry.load.state == "ended", "everything was ordered long ago"
    late.cuda.run_all()
    late.steps(run, 3)
    assert run.recorder.of("r").prefilled
    late.cuda.source = random.Random(0)
    run_until_idle(run.bench)
    run.assert_result("r")


def test_an_idle_engine_waits_for_its_device(late: Late) -> None:
    """Nobody else runs, and the device does nothing by itself: the request is served all the same."""
    run = late.run()
    waited = len(late.cuda.waited)
    run.feed("r", run.data("r", run.submit("r")))
    run_until_idle(run.bench)
    run.assert_result("r")
    assert late.work in {stream for stream, _ in late.cuda.waited[waited:]}


def test_layers_of_a_prefill_are_announced_before_its_answer_ends(late: Late) -> None:
    run = late.run()
    run.submit("order", PRIVATE, sampling=None)
    run_until_idle(run.bench)
    heard = run.recorder.of("order")
    assert len({(unit.chunk, unit.layer) for unit in heard.units}) == -(-TOTAL // steps.CHUNK) * NUM_LAYERS
    assert heard.space.has_e(TAPS[-1], 0, TOTAL)
    assert run.recorder.sequence[-1] == ("order", "end")


def test_hidden_states_are_there_when_their_layer_is_announced(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    run = late.run()
    late.cuda.source = random.Random(1)
    seen = []
    original = run.recorder.unit_done

    def unit_done(request_id: str, unit: Any, space: Any) -> None:
        if unit.layer in TAPS:
            seen.append(space.has_e(unit.layer, unit.start, unit.stop))
        original(request_id, unit, space)

    monkeypatch.setattr(run.recorder, "unit_done", unit_done)
    run.submit("order", PRIVATE, sampling=None)
    run_until_idle(run.bench)
    assert seen
    assert all(seen)


def test_an_error_ends_its_own_load_only_and_when_it_is_its_turn(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    run = late.run()
    late.busy(run)
    original = RankMemory.write_kv

    def write_kv(self: RankMemory, layer: int, block_ids: Any, cached: int, start: int, *rest: Any) -> None:
        if start >= 16 and tuple(block_ids) in broken:
            raise OSError("the bytes are gone")
        original(self, layer, block_ids, cached, start, *rest)

    broken: list[tuple[int, ...]] = []
    monkeypatch.setattr(RankMemory, "write_kv", write_kv)
    for seed, name in enumerate(("bad", "good"), 1):
        run.feed(name, run.data(name, run.submit(name, seed=seed)))
    run.bench.step()
    scheduler = late.shared.runtime.scheduler
    loads = {entry.listener.request.request_id: entry.load for entry in scheduler.entries.values()}  # type: ignore[union-attr]
    broken.append(loads["bad"].block_ids)
    late.steps(run, 4)
    assert run.recorder.of("bad").error is None, "the device has not come to it"
    late.cuda.source = random.Random(2)
    run_until_idle(run.bench)
    assert "the bytes are gone" in str(run.recorder.of("bad").error)
    run.assert_result("good")


def test_a_request_that_goes_while_its_load_is_on_its_way_leaves_nothing(late: Late) -> None:
    late.shared.settle()
    free = late.shared.free_blocks()
    run = late.run()
    late.busy(run)
    plan = plan_of(exact(0, 8, "twin"), computed(8, 20))
    run.feed("r", run.data("r", run.submit("r", plan)))
    late.steps(run, 4)
    run.bench.engine.cancel("r", "nobody listens")
    late.steps(run, 4)
    assert isinstance(run.recorder.of("r").error, Cancelled)
    assert set(late.shared.served()) <= set(late.shared.runtime.scheduler.entries)
    run.bench.engine.cancel("busy", "enough")
    run_until_idle(run.bench)
    assert late.shared.free_blocks() == free
    assert not late.shared.served()


def test_a_close_with_slices_on_their_way(late: Late) -> None:
    late.shared.settle()
    free = late.shared.free_blocks()
    run = late.run()
    late.busy(run)
    run.feed("r", run.data("r", run.submit("r")))
    late.steps(run, 3)
    run.bench.engine.close()
    assert isinstance(run.recorder.of("r").error, Cancelled)
    assert (late.shared.free_blocks(), late.shared.served()) == (free, [])


def test_stores_are_said_when_the_bytes_are_there(late: Late) -> None:
    run = late.run()
    layout = run.bench.engine.layout("receiver")
    arena = Arena(layout, 4, 4, shared=True)
    arena.buffer[:] = 0
    run.submit("r", PRIVATE)
    run_until_idle(run.bench)
    scheduler = late.shared.runtime.scheduler
    (key,) = scheduler.entries
    late.busy(run)
    said: dict[int, str] = {}
    assert arena.description is not None
    kv = StoreKV(1, tuple(scheduler.blocks(key)), 0, (2,), arena.description, (3, 1))
    scheduler.store(kv, lambda why: said.__setitem__(1, why))
    scheduler.store(StoreE(2, "nobody", 0, TAPS[1], arena.description, (0,)), lambda why: said.__setitem__(2, why))
    late.cuda.source = None
    run.bench.step()
    assert set(said) == {2}, "what fails is said at once, what is on its way is not"
    assert not arena.buffer.any()
    late.cuda.run_all()
    run.bench.step()
    assert said[1] == ""
    keys, values = run.recorder.of("r").space.read(2, 0, 2 * steps.BLOCK)
    rows = np.stack([arena.kv_block(2, slot).view(np.float32) for slot in (3, 1)])
    found = np.concatenate([keys.numpy(), values.numpy()], axis=1).reshape(2, steps.BLOCK, 2, -1)
    assert np.array_equal(rows.reshape(2, 2, steps.BLOCK, -1), found.transpose(0, 2, 1, 3))
    run.bench.engine.cancel("busy", "enough")
    run_until_idle(run.bench)
    arena.close()


def test_preempted_loads_are_written_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Few blocks: loads are copied out and in while slices of others are on their way."""
    cuda = FakeCuda(random.Random(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_side, "lane_for", lambda *_: CudaLane(cuda, overlap=True))  # type: ignore[arg-type]
        family = lora_family("llama", tmp_path_factory.mktemp("few"))
        options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 15, "enable_prefix_caching": True}
        shared = SharedEngine(family, max_model_len=320, **options)
    plans = {
        "partial": plan_of(*PARTIAL.segments[:1], computed(40, 101)),
        "token-wise": plan_of(token_wise(0, 88, [3, 40, 41, 87], "sender"), computed(88, 101)),
        "exact": plan_of(exact(0, 88, "twin"), computed(88, 101)),
    }
    run = Run(shared.make, family.name)
    names = {f"{name} {index}": plan for index in range(2) for name, plan in plans.items()}
    for seed, (name, plan) in enumerate(names.items()):
        run.feed(name, run.data(name, run.submit(name, plan, seed=seed, sampling=greedy(60), taps=())))
    swapped = 0
    while run.bench.step():
        swapped += sum(entry.load.swapped for entry in shared.runtime.scheduler.entries.values())
    assert swapped, "the test is about preemption"
    for name, plan in names.items():
        heard = run.recorder.of(name)
        assert heard.error is None, heard.error
        assert len(heard.tokens) == 60
        # KV that gave way to others is not there to be compared: tokens and log probabilities are
        model, token_ids, _, seed = run.submitted[name]
        state = oracle.execute(run.models[model], token_ids, plan, contexts(run.arch, len(token_ids), seed))
        _, choices, logits = oracle.generate(run.models[model], state, len(heard.tokens), heard.tokens)
        tally = Tally()
        assert_tokens(heard, choices, logits, tally)
        tally.close()
    shared.close()


# --- how many slices are out --------------------------------------------------------------------------------------------------


def load_of_all_data() -> Load:
    """A load of five chunks, of which everything has arrived and which has blocks."""
    load = Load("k", PARTIAL, range(TOTAL), 0, NUM_LAYERS, steps.CHUNK)
    for chunk in load.own_chunks:
        for layer in (*range(NUM_LAYERS), E_LAYER):
            load.arrived(chunk.index, layer)
    assert load.all_arrived
    load.allocated(range(1, 9), 0)
    return load


def step_of(tokens: int = 1) -> Any:
    """What vLLM's scheduler says of a step in which others compute."""
    nothing = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        preempted_req_ids=(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=nothing,
        num_scheduled_tokens={},
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_slice_is_ordered_behind_two_that_are_not_done(num_ranks: int) -> None:
    side = SchedulerSide(32, num_ranks)
    side.configure(steps.CHUNK, NUM_LAYERS)
    assert side.loads is not None
    side.loads.add(load_of_all_data(), "vllm-id")
    ordered = [bool(side.plan_step(step_of()).orders) for _ in range(5)]
    assert ordered == [True] * MAX_SLICES_OUT + [False] * (5 - MAX_SLICES_OUT)
    assert side.active, "others compute"
    side.plan_step(step_of(0))
    assert not side.active
    for rank in range(num_ranks):
        assert not side.plan_step(step_of()).orders, "not every rank has said it"
        side.step_reported([[SliceTook(0.5, 0.25, 1)]])
        assert side.slice_s == (0.25 if rank == num_ranks - 1 else 0.0)
    assert side.active
    assert side.plan_step(step_of()).orders
    assert not side.plan_step(step_of()).orders
    assert side.plan_step(step_of(0)).idle


def test_what_is_no_slice_is_ordered_in_any_case_and_not_counted() -> None:
    side = SchedulerSide(32)
    side.configure(steps.CHUNK, NUM_LAYERS)
    assert side.loads is not None
    for number in range(MAX_SLICES_OUT + 1):
        side._orders.append(ReleaseBlocks(f"request {number}"))
        assert side.plan_step(step_of()).orders == [ReleaseBlocks(f"request {number}")]
    side.loads.add(load_of_all_data(), "vllm-id")
    assert [is_slice(side.plan_step(step_of()).orders) for _ in range(3)] == [True, True, False]


def test_a_request_that_ends_before_its_load_was_received_holds_no_blocks() -> None:
    """vLLM waits for the load's report, and takes the blocks back by itself: a second report for them would end it."""
    from vllm.v1.request import RequestStatus

    side = SchedulerSide(32)
    side.configure(steps.CHUNK, NUM_LAYERS)
    load = load_of_all_data()
    side.enter(Entry(load, TOTAL, 1, lambda states: None), Serve("k", None))  # type: ignore[arg-type]
    request: Any = SimpleNamespace(
        request_id="vllm-id", kv_transfer_params={PARAMETER: "k"}, status=RequestStatus.FINISHED_STOPPED
    )
    side.on_new_request(request)
    load.end("vllm-id")
    assert side.finished(request, ([1, 2, 3],)) is False
    assert side.entries == {}
    side.received({"vllm-id"})
    orders = side.plan_step(step_of()).orders
    assert [type(order) for order in orders] == [Serve, Forget]

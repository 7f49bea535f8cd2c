"""What runs after what on a CUDA device, and what is said when: ``CudaLane`` on a device that the test lets run. Needs neither vLLM nor a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from kvkin.engines.vllm.cuda_lane import CudaLane, lane_for
from kvkin.engines.vllm.lanes import HostLane, Pending
from kvkin.engines.vllm.overlap import why_not_beside


class Mark:
    def __init__(self) -> None:
        self.reached = False
        self.waited = 0

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True
        self.waited += 1


# --- callbacks -------------------------------------------------------------------------------------------------------------


def test_callbacks_run_in_their_order_once_their_marks_are_reached() -> None:
    pending, marks, said = Pending(), [Mark() for _ in range(3)], []
    for index, mark in enumerate(marks):
        pending.add(mark, lambda index=index: said.append(index))  # type: ignore[misc]
    marks[1].reached = True
    pending.poll()
    assert said == [], "the first is not there yet"
    marks[0].reached = True
    pending.poll()
    assert said == [0, 1]
    assert len(pending) == 1


def test_pace_waits_for_the_oldest_only_and_for_those_of_weight() -> None:
    pending, marks, said = Pending(), [Mark() for _ in range(4)], []
    for index, (mark, weight) in enumerate(zip(marks, (1, 0, 1, 1), strict=True)):
        pending.add(mark, lambda index=index: said.append(index), weight)  # type: ignore[misc]
    pending.pace(3)
    assert not any(mark.waited for mark in marks)
    pending.pace(1)
    assert said == [0, 1, 2]
    assert [mark.waited for mark in marks] == [1, 1, 1, 0]
    assert pending.weight == 1


def test_a_callback_may_ask_for_another() -> None:
    pending, said = Pending(), []
    first, second = Mark(), Mark()
    first.reached = second.reached = True

    def ask() -> None:
        said.append("first")
        pending.poll()  # as one that reads what it was told of
        pending.add(second, lambda: said.append("second"))

    pending.add(first, ask)
    pending.poll()
    assert said == ["first", "second"]


def test_what_is_cleared_is_waited_for_and_never_said() -> None:
    pending, mark = Pending(), Mark()
    pending.add(mark, lambda: pytest.fail("it was cleared"), 1)
    pending.clear()
    pending.poll()
    assert (mark.waited, pending.weight, len(pending)) == (1, 0, 0)


# --- streams ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["beside", "between"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def slice_of(lane: CudaLane, cuda: FakeCuda, name: str, said: list[str]) -> None:
    with lane.slice():
        cuda.launch(name)
        lane.then(lambda: said.append(name), weight=1)


def test_a_slice_follows_the_forward_before_it_and_holds_up_the_next_only_without_overlap(overlap: bool) -> None:
    cuda, said = FakeCuda(), []
    lane = CudaLane(cuda, overlap=overlap)
    cuda.launch("forward 1")
    slice_of(lane, cuda, "slice", said)
    assert cuda.waited == [], "the host waits for nothing"
    lane.begin_step()
    cuda.launch("forward 2")
    assert ("slice" in cuda.needs(cuda.main)) is not overlap
    stream = next(each for each in cuda.streams if "slice" in each.given)
    assert cuda.needs(stream, stream.given.index("slice")) >= {"forward 1"}
    assert "forward 2" not in cuda.needs(stream, stream.given.index("slice"))


def test_nothing_is_said_of_a_slice_before_it_is_done(overlap: bool) -> None:
    cuda, said = FakeCuda(), []
    lane = CudaLane(cuda, overlap=overlap)
    for name in ("first", "second"):
        slice_of(lane, cuda, name, said)
    lane.poll()
    assert said == []
    stream = next(each for each in cuda.streams if "first" in each.given)
    cuda.run(stream, stream.given.index("second"))
    lane.poll()
    assert said == ["first"]
    cuda.run_all()
    lane.poll()
    assert said == ["first", "second"]


def test_what_a_forward_is_about_to_overwrite_leaves_first_but_need_not_arrive() -> None:
    cuda, said = FakeCuda(), []
    lane = CudaLane(cuda, overlap=True)
    cuda.launch("forward 1")
    with lane.saving():
        cuda.launch("gather")
        lane.to_host(torch.zeros(4))
        lane.then(lambda: said.append("saved"))
    cuda.launch("forward 2")
    assert cuda.needs(cuda.main) == {"forward 1", "gather", "forward 2"}
    copies = next(each for each in cuda.streams if "gather" in each.given)
    assert "forward 1" in cuda.needs(copies, copies.given.index("gather"))
    cuda.run(cuda.main)
    lane.poll()
    assert said == [], "the copy is still on its way"
    cuda.run_all()
    lane.poll()
    assert said == ["saved"]


def test_a_slice_that_writes_back_follows_the_copy_out(overlap: bool) -> None:
    cuda = FakeCuda()
    lane = CudaLane(cuda, overlap=overlap)
    with lane.saving():
        lane.to_host(torch.zeros(4))
    slice_of(lane, cuda, "write back", [])
    stream = next(each for each in cuda.streams if "write back" in each.given)
    assert "copy" in cuda.needs(stream)


def test_taps_are_read_beside_the_forward_and_before_the_next_one() -> None:
    cuda, said = FakeCuda(), []
    lane = CudaLane(cuda, overlap=True)
    cuda.launch("layer 0")
    with lane.tapping():
        cuda.launch("read taps")
        lane.to_host(torch.zeros(4))
        lane.then(lambda: said.append("kept"), weight=1)
    cuda.launch("layer 1")
    assert cuda.needs(cuda.main) == {"layer 0", "layer 1"}
    copies = next(each for each in cuda.streams if "read taps" in each.given)
    assert "layer 0" in cuda.needs(copies, copies.given.index("read taps"))
    lane.begin_step()
    cuda.launch("next forward")
    assert cuda.needs(cuda.main) >= {"read taps", "copy"}
    assert said == []
    lane.end_forward()
    assert said == ["kept"]


def test_layers_are_announced_while_a_long_slice_runs() -> None:
    cuda, said = FakeCuda(), []
    lane = CudaLane(cuda, overlap=True)
    slice_of(lane, cuda, "long slice", said)
    for layer in range(4):
        cuda.launch(f"layer {layer}")
        lane.then(lambda layer=layer: said.append(f"layer {layer}"), weight=1)  # type: ignore[misc]
        lane.pace(2)
    assert said == ["layer 0", "layer 1"], "two are launched ahead of what is announced"
    lane.end_forward()
    assert said == [f"layer {layer}" for layer in range(4)]
    assert (next(each for each in cuda.streams if "long slice" in each.given), "long slice") not in cuda.ran


def test_reads_wait_for_themselves_only() -> None:
    cuda = FakeCuda()
    lane = CudaLane(cuda, overlap=True)
    slice_of(lane, cuda, "long slice", [])
    cuda.launch("forward")
    source = torch.arange(4.0)
    (found,) = lane.read(lambda: [source])
    source.zero_()
    assert found.tolist() == [0, 1, 2, 3]
    ((stream, place),) = cuda.waited
    assert cuda.needs(stream, place) == {"copy"}


def test_bytes_may_change_once_they_were_taken() -> None:
    lane = CudaLane(FakeCuda(), overlap=True)
    source = torch.arange(4.0)
    found = lane.to_device(source)
    source.zero_()
    assert found.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("left", "said"), [(0, ["first", "second"]), (1, ["first"]), (2, [])])
def test_an_idle_step_waits_until_so_many_slices_are_left(left: int, said: list[str]) -> None:
    cuda, heard = FakeCuda(), []
    lane = CudaLane(cuda, overlap=True)
    for name in ("first", "second"):
        slice_of(lane, cuda, name, heard)
    lane.settle(left)
    assert heard == said


def test_times_are_the_devices() -> None:
    cuda, seconds = FakeCuda(), []
    lane = CudaLane(cuda, overlap=True)
    with lane.slice():
        span = lane.begin()
        cuda.launch("unit")
        cuda.launch("unit")
        span.end()
        lane.then(lambda: seconds.append(span.seconds))
    cuda.run_all()
    lane.poll()
    assert seconds == [0.002]


def test_a_close_waits_and_says_nothing(overlap: bool) -> None:
    cuda, said = FakeCuda(), []
    lane = CudaLane(cuda, overlap=overlap)
    slice_of(lane, cuda, "slice", said)
    lane.close()
    assert [work for _, work in cuda.ran] == ["slice"]
    cuda.run_all()
    lane.poll()
    lane.close()
    assert said == []


def test_an_error_in_a_slice_leaves_the_streams_as_they_were(overlap: bool) -> None:
    cuda = FakeCuda()
    lane = CudaLane(cuda, overlap=overlap)
    with pytest.raises(ValueError, match="broken"), lane.slice():
        raise ValueError("broken")
    assert cuda.current() is cuda.main
    said: list[str] = []
    cuda.launch("layer")
    lane.then(lambda: said.append("layer"), weight=1)
    lane.end_forward()
    assert said == ["layer"], "said of the forward, not of the slice"


# --- which lane ------------------------------------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    facts = {"world_size": 1, "use_ubatching": False, "lora": None, "is_moe": False, "quantization": None} | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=facts["world_size"], use_ubatching=facts["use_ubatching"]),
        model_config=SimpleNamespace(is_moe=facts["is_moe"], quantization=facts["quantization"]),
        lora_config=facts["lora"],
    )


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_dense_models_of_one_rank_may_overlap(backend: str) -> None:
    assert why_not_beside(config(), backend) == ""


@pytest.mark.parametrize(
    ("changes", "backend", "why"),
    [
        ({"world_size": 2}, "FLASH_ATTN", "communicator"),
        ({"use_ubatching": True}, "FLASH_ATTN", "split over streams"),
        ({"lora": object()}, "FLASH_ATTN", "adapter"),
        ({"is_moe": True}, "FLASH_ATTN", "experts"),
        ({"quantization": "gptq_marlin"}, "FLASH_ATTN", "quantised"),
        ({}, "FLASHINFER", "FLASHINFER"),
        ({}, "A_NEW_ONE", "A_NEW_ONE"),
    ],
)
def test_what_has_memory_of_its_own_may_not(changes: dict[str, Any], backend: str, why: str) -> None:
    assert why in why_not_beside(config(**changes), backend)


def test_in_host_memory_everything_is_done_when_it_was_called() -> None:
    lane = lane_for(config(), torch.device("cpu"), "CPU_ATTN")
    assert isinstance(lane, HostLane)
    said: list[str] = []
    with lane.slice():
        lane.then(lambda: said.append("slice"), weight=1)
        assert said == ["slice"]
    tensor = torch.zeros(4)
    assert lane.to_host(tensor) is lane.to_device(tensor) is tensor

"""What people see of pairs and decisions: ``kvkin status``, ``kvkin ask --verbose``."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from kvkin.kv.plan import PlanKind
from kvkin.tools.cluster_view import status_view
from kvkin.tools.decision_view import decision_view, inputs_text
from kvkin.tools.pairs_view import groups_text
from kvkin.transport.messages import Alternative, DecisionInputs, PairGroup, PairStatus, StatusReply


def shown(what: RenderableType) -> str:
    """As on a terminal of 200 columns, blanks collapsed."""
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(" ".join(line.split()) for line in console.file.getvalue().splitlines())


CHOSEN = Alternative("d0", PlanKind.PARTIAL, (10, 20), 0.0213, 0.4, ("p0", "d1"), True)
INPUTS = DecisionInputs(
    0.05,
    0.5,
    0.4,
    0.125,
    104.4e6,
    41_000.0,
    (
        CHOSEN,
        Alternative("d0", PlanKind.PARTIAL, None, None, 0.2, ("p0",)),
        Alternative("d1", PlanKind.PRIVATE, None, 0.0, 2.0, ()),
    ),
)


def test_a_decision_is_shown_with_its_inputs_and_alternatives() -> None:
    lines = shown(decision_view(INPUTS)).splitlines()
    assert lines[0] == (
        "estimated 0.400 s (target 0.500 s), of it queue 0.125 s; at 104 MB/s and 41,000 layer tokens/s; loss up to 0.05"
    )
    assert lines[1] == "weighed on from recomputed loss first token"
    assert lines[2] == "partial (chosen) d0 p0, d1 [10, 20) 0.021 0.400 s"
    assert lines[3] == "partial d0 p0 none ? 0.200 s"
    assert lines[4] == "private d1 0.000 2.000 s"


def test_nothing_to_pull_and_no_target_are_left_out() -> None:
    text = inputs_text(DecisionInputs(0.0, None, 0.4, 0.0, 0.0, 1000.0))
    assert text == "estimated 0.400 s, of it queue 0.000 s; at 1,000 layer tokens/s; loss up to 0"


def status(*pairs: PairStatus) -> StatusReply:
    return StatusReply("1", "router-0", 1.0, 0, (), 0, {}, pairs=pairs)


def test_the_status_shows_the_pairs() -> None:
    profiled = PairStatus(
        "base", "qa", "profiled", (PairGroup(None, 0.03), PairGroup((2, 6), 0.004)), "profiles/p.json"
    )
    refused = PairStatus("base", "code", "refused", (), "profiles/c.json: layer 3 differs")
    text = shown(status_view(status(profiled, refused)))
    assert "base qa profiled none: 0.030, [2, 6): 0.004 profiles/p.json" in text
    assert "base code refused profiles/c.json: layer 3 differs" in text
    assert "sender" not in shown(status_view(status()))


def test_an_unprofiled_group_has_no_loss() -> None:
    assert groups_text([((2, 6), None)]) == "[2, 6)"

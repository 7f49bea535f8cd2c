"""What the coder and the tester say to each other: the script of the example, and how an answer is marked. Pure.

In each round the coder is shown the head of a function and goes on with it; then the tester says what the task demands, so that
a test could check it. All of it is one chat: whoever speaks next reads the task file and everything that was said. The prompts
have the forms on which the demo family's fine-tunes were trained, the texts are this example's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvkin.tools.finetune_data import CONTINUE, ask
from kvkin.tools.scoring import normalize_answer

TASK_FILE = Path(__file__).with_name("ferry.py.txt")
CODER, TESTER = "coder", "tester"


@dataclass(frozen=True)
class Round:
    """One function to go on with (``head``: its first lines) and one fact to ask for (``expected``: the extract)."""

    head: str
    question: str
    expected: str


@dataclass(frozen=True)
class Script:
    """The task file that both agents work on, and the rounds in their order."""

    task: str
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Line:
    """What one agent is told in its turn, and by what its answer is marked: ``head`` for the coder, ``expected`` for the
    tester; the other one is empty."""

    round: int
    agent: str
    text: str
    head: str = ""
    expected: str = ""


ROUNDS = (
    Round(
        '''\
def ticket(kind, age, month, islander):
    """What somebody pays, in whole crowns."""
    if age < 7:
        return 0
    price = PRICES[kind]
    if is_summer(month):''',
        "How much does a ticket for a bicycle cost?",
        "6",
    ),
    Round(
        '''\
def is_red(deck):
    """Whether a vehicle on the deck carries dangerous goods."""
    for vehicle in deck:
        if vehicle.dangerous:''',
        "What is a sailing with dangerous goods called?",
        "red sailing",
    ),
    Round(
        '''\
def board(deck, vehicle):
    """Put a vehicle behind the others; DeckFull if it does not fit there."""
    needed = used_metres([*deck, vehicle]) + CREW_METRES''',
        "What does a vehicle that does not fit any more raise?",
        "DeckFull",
    ),
    Round(
        '''\
def manifest(deck):
    """One line a vehicle: plate, then metres with one decimal."""
    lines = []
    for vehicle in deck:''',
        "What is the first thing in each line of the manifest?",
        "plate",
    ),
    Round(
        '''\
def free_metres(deck):
    """Metres that are left behind the vehicles, without the crew's part."""
    used = used_metres(deck)''',
        "How long is the deck of the Alka?",
        "46",
    ),
    Round(
        '''\
def leave(deck):
    """Take the vehicle off the deck that drove on first, and return it."""
    if not deck:''',
        "Who sells tickets in the yellow hut?",
        "Marit",
    ),
)


def script() -> Script:
    """The example's own script. Its rounds are what ``--rounds`` can ask for at most."""
    return Script(TASK_FILE.read_text(encoding="utf-8").strip(), ROUNDS)


def lines(script: Script, rounds: int) -> Iterator[Line]:
    """The turns of the first ``rounds`` rounds; the very first one shows the task file."""
    for number, each in enumerate(script.rounds[:rounds], 1):
        shown = f"{script.task}\n\n\n{each.head}" if number == 1 else each.head
        yield Line(number, CODER, f"{shown}\n\n{CONTINUE}", head=each.head)
        yield Line(number, TESTER, ask(each.question), expected=each.expected)


def marks(line: Line, text: str, *, cut_off: bool) -> bool:
    """Whether an answer does what a small model may be asked for: the code parses, or the expected extract is in it."""
    if line.agent == CODER:
        return parses(line.head, text, cut_off=cut_off)
    return f" {normalize_answer(line.expected)} " in f" {normalize_answer(text)} "


def parses(head: str, text: str, *, cut_off: bool) -> bool:
    """Whether ``text`` goes on with the function ``head`` by the rules of Python's grammar, at least one statement long.

    What comes after the function's end is not looked at. Of an answer that the token limit cut off, neither the last line counts
    nor a block that it would have begun. Markdown fences around code are no mistake.
    """
    written = [line for line in text.split("\n") if not line.lstrip().startswith("```")]
    end = next((index for index, line in enumerate(written) if line.strip() and not line[0].isspace()), None)
    body = written[:end]
    if cut_off and end is None:
        body = body[:-1]
        while body and (not body[-1].strip() or body[-1].rstrip().endswith(":")):
            body.pop()
    try:
        function = ast.parse("\n".join([head, *body, ""]))
    except (SyntaxError, ValueError):  # ValueError: a zero byte
        return False
    return any(getattr(node, "lineno", 0) > head.count("\n") + 1 for node in ast.walk(function))

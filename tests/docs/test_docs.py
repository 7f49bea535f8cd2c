"""The documents tell the truth where a test can know it: links, paths, commands, options, settings, names of functions, examples.

Commands are parsed, not run. A document that is made by a tool is compared with what the tool would write now.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tyro
import yaml

from kvkin.configs.convert import field_types
from kvkin.configs.loader import load_cluster, parse_cluster
from kvkin.configs.schema import ClusterConfig
from kvkin.kv import errors
from kvkin.tools import cli, docs_scores, docs_states

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kv", "configs", "transport", "engines", "prefill_nodes", "decode_nodes", "router", "tools")
FOLDERS = (*ROOMS, "docs", "tests", "src", ".ci")
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
# the design also names what is still to come
AS_BUILT = [document for document in DOCUMENTS if document.name != "design.md"]
SECTIONS = ("timeouts", "limits", "transport", "router", "drift")

document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
as_built = pytest.mark.parametrize("file", AS_BUILT, ids=lambda file: file.name)


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks of these languages."""
    found = re.findall(r"^```([\w-]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def prose(text: str) -> str:
    """The text without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Inline code."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(file: Path) -> frozenset[str]:
    return frozenset(map(slug, re.findall(r"^#+ (.*)$", prose(file.read_text()), re.MULTILINE)))


@document
def test_links_resolve(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(file.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (file.parent / path).resolve() if path else file
        assert linked.exists(), f"{file.name}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{file.name}: {target}; {linked.name} has {sorted(anchors(linked))}"


@as_built
def test_paths_exist(file: Path) -> None:
    for span in spans(file.read_text()):
        if not re.fullmatch(r"[\w.@*/-]+/[\w.@*-]*", span) or span.split("/")[0] not in FOLDERS:
            continue
        assert list(ROOT.glob(span.rstrip("/"))), f"{file.name}: {span}"


# --- commands ---------------------------------------------------------------------------------------------------------


def command_lines(text: str) -> Iterator[str]:
    """Shell lines of the fenced blocks, without prompt and comment; of a console, only what was typed."""
    for block in blocks(text, "sh", "bash"):
        yield from (line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip())
    for block in blocks(text, "console"):
        yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))


def calls(text: str) -> list[list[str]]:
    """Words of every shell line, and of every span that calls kvkin or make. An ellipsis ends what can be checked."""
    found = [shlex.split(line, comments=True) for line in command_lines(text)]
    return found + [shlex.split(span) for span in spans(text) if re.match(r"(kvkin|make) \S", span)]


def parse(words: list[str]) -> None:
    """Parse the options of a ``kvkin`` call with the command's own parser. SystemExit for what it does not know."""
    command = cli.find_command(words)
    assert not isinstance(command, int), f"no command: kvkin {' '.join(words)}"
    module, name = command[0].target.split(":")
    tyro.cli(getattr(importlib.import_module(module), name), prog=f"kvkin {command[0].words}", args=command[1])


@document
def test_commands_parse(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in calls(file.read_text()):
        if words[:1] != ["kvkin"]:
            continue
        if words[1] in ("version", "--log-level"):
            continue
        command = cli.find_command(words[1:])
        if isinstance(command, int) and len(words) == 2:
            # the name of a group, such as "kvkin bench"
            assert any(known.startswith(f"{words[1]} ") for known in cli.COMMANDS), f"{file.name}: {words}"
            continue
        assert not isinstance(command, int), f"{file.name}: {' '.join(words)}"
        if not command[1]:
            continue  # named, not called
        try:
            parse(words[1:])
        except SystemExit:
            pytest.fail(f"{file.name}: {' '.join(words)}\n{capsys.readouterr().err}")


@document
def test_make_targets_and_scripts_exist(file: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in calls(file.read_text()):
        plain = [word for word in words if "=" not in word]
        if plain[:1] == ["make"]:
            assert set(plain[1:]) <= set(targets), f"{file.name}: {' '.join(words)}"
        if plain and plain[0].startswith("tools/"):
            assert (ROOT / plain[0]).is_file(), f"{file.name}: {' '.join(words)}"


@pytest.mark.parametrize("words", cli.COMMANDS)
def test_every_command_has_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*words.split(), "--help"])
    assert ended.value.code == 0
    assert f"kvkin {words}" in capsys.readouterr().out


def test_every_command_is_in_a_document() -> None:
    text = "\n".join(file.read_text() for file in DOCUMENTS)
    assert [words for words in cli.COMMANDS if f"kvkin {words}" not in text] == []


# --- examples ---------------------------------------------------------------------------------------------------------


@document
def test_examples_in_yaml_and_python(file: Path) -> None:
    text = file.read_text()
    for block in blocks(text, "yaml"):
        if "families:" in block and "nodes:" in block:
            parse_cluster(block, file.name)
        else:
            yaml.safe_load(block)
    for block in blocks(text, "python"):
        compile(block, file.name, "exec")
        check_imports(block)


def check_imports(source: str) -> None:
    """What an example imports from kvkin is there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvkin."):
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "clusters").glob("*.yaml")), ids=lambda file: file.name)
def test_cluster_files_load(file: Path) -> None:
    load_cluster(file)


# --- names ------------------------------------------------------------------------------------------------------------


@document
def test_settings_exist(file: Path) -> None:
    types: dict[str, Any] = field_types(ClusterConfig)
    for span in spans(file.read_text()):
        section, _, rest = span.partition(".")
        if section not in SECTIONS or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", span) or rest in ("md", "sh", "py"):
            continue
        current: Any = types[section]
        for name in rest.split("."):
            fields = field_types(current) if isinstance(current, type) and issubclass(current, msgspec.Struct) else {}
            assert name in fields, f"{file.name}: {span}"
            current = fields[name]


@functools.cache
def defined() -> tuple[frozenset[str], dict[str, set[str]]]:
    """(functions and classes, class -> names in its body) of all rooms."""
    names: set[str] = set()
    members: dict[str, set[str]] = {}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                if isinstance(node, ast.ClassDef):
                    members.setdefault(node.name, set()).update(body_names(node))
    return frozenset(names), members


def body_names(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield item.name
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id
        elif isinstance(item, ast.Assign):
            yield from (target.id for target in item.targets if isinstance(target, ast.Name))


@as_built
def test_functions_and_classes_exist(file: Path) -> None:
    """``name()``, ``Class.name()``, ``Class.name`` and ``ClassName`` in inline code."""
    names, members = defined()
    for span in spans(file.read_text()):
        if match := re.fullmatch(r"([A-Z]\w+)\.(?!md$)(\w+)(\(\))?", span):
            assert match[2] in members.get(match[1], ()), f"{file.name}: {span}"
        elif match := re.fullmatch(r"(\w+)\(\)", span):
            # functions of the tests are named as well
            assert match[1] in names or match[1].startswith("check_"), f"{file.name}: {span}"
        elif re.fullmatch(r"([A-Z][a-z]+){2,}", span):
            assert span in names, f"{file.name}: {span}"


@document
def test_names_stand_in_the_files_that_are_named_with_them(file: Path) -> None:
    """```name()` (`file.py``` in the text: that file defines it."""
    text = re.sub(r"\s+", " ", prose(file.read_text()))
    for name, path in re.findall(r"`(?:\w+\.)?(\w+)(?:\(\))?` \(`([\w/]+\.py)`", text):
        assert re.search(rf"(def|class) {name}\b|\b{name}:", (ROOT / path).read_text()), (
            f"{file.name}: {name} in {path}"
        )


def test_protocol_lists_the_codes_that_clients_get() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \| (?:yes|no) \|", (ROOT / "docs" / "protocol.md").read_text(), re.MULTILINE))
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.KvkinError)]
    known = {one.code: one.retryable for one in kinds}
    assert listed <= set(known)
    inner = {one.code for one in kinds if issubclass(one, errors.SourceError)}  # cost a fallback, never the request
    assert set(known) - listed == inner | {"config", "transport_local"}


# --- made documents ---------------------------------------------------------------------------------------------------


def test_states_are_those_of_the_tables() -> None:
    written = docs_states.OUT.read_text()
    assert written == docs_states.render(), "run python -m kvkin.tools.docs_states"


@pytest.mark.parametrize("file", [file for file, _ in docs_states.TABLES])
def test_tables_name_the_states_of_the_code(file: str) -> None:
    module = importlib.import_module(f"kvkin.{file.removesuffix('.py').replace('/', '.')}")
    rows = docs_states.rows_of(module.__doc__ or "")
    named = {row.target for row in rows} | set(docs_states.states_of(rows))
    # a request that is done is forgotten, so it has no state of its own in the decode node
    assert named - {"done"} == {state.value for state in module.State}


def test_a_table_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="rules of a table"):
        docs_states.rows_of("A docstring\n\n====  ==\nno    table\n====  ==\n")


def test_scores_are_those_of_the_cards() -> None:
    cards = docs_scores.cards()
    if not cards:
        pytest.skip("no adapter has been scored yet")
    text = docs_scores.README.read_text()
    assert text == docs_scores.with_scores(text, cards), "run python -m kvkin.tools.docs_scores"


def test_scores_of_a_card() -> None:
    def score(mean: float, n: int) -> dict[str, float]:
        return {"mean": mean, "half_width_95": 0.02, "n": n}

    card = {
        "task": "qa",
        "settings": {"layers": "15-30"},
        "scores": {
            "metric": "token F1",
            "before": {"all": score(0.4, 160), "chat": score(0.3, 40)},
            "after": {"all": score(0.65, 160), "chat": score(0.5, 40)},
            "gain": score(0.25, 160),
        },
    }
    text = docs_scores.with_scores(f"before\n{docs_scores.BEGIN}old\n{docs_scores.END}\nafter", {"tiny": card})
    assert text.startswith(f"before\n{docs_scores.BEGIN}{docs_scores.HEAD}| `tiny` (LoRA on layers 15-30)")
    assert "| token F1 | all | 160 | 0.400 | 0.650 | +0.250 ± 0.020 |\n| | | | chat | 40 | 0.300 | 0.500 | |" in text
    assert text.endswith(f"{docs_scores.END}\nafter")

"""The command line as a user meets it: help that is quick and teaches, one line for what cannot be done, quiet Ctrl-C."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog
import tyro

from kvkin.kv.errors import NodeUnavailable
from kvkin.tools import cli, lifeline, logs

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tools" / "launch"


def test_bare_call_and_help_say_what_every_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == bare
    for command in cli.COMMANDS.values():
        assert f"kvkin {command.words}" in bare
        assert command.summary in bare
    assert all(len(line) <= 125 for line in bare.splitlines())


def test_help_imports_nothing_heavy() -> None:
    """Whether it is quick depends on the machine; what makes it slow does not."""
    code = "import sys; from kvkin.tools import cli; cli.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    heavy = {"torch", "transformers", "tyro", "rich", "structlog", "zmq", "msgspec", "numpy", "yaml"}
    assert not heavy & set(done.stderr.split())


def test_every_command_names_a_class_with_run() -> None:
    """Read from the sources, as importing all of them takes long."""
    for command in cli.COMMANDS.values():
        module, name = command.target.split(":")
        path = ROOT / Path(*module.split(".")[1:]).with_suffix(".py")
        if not path.exists():
            pytest.fail(f"kvkin {command.words}: {path} is missing")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, command.target


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["askk"], "did you mean `kvkin ask`?"),
        (["bench", "piepline"], "did you mean `kvkin bench pipeline`?"),
        (["xyzzy"], "one of: demo,"),
        (["config", "frobnicate"], "config check"),
    ],
)
def test_unknown_command_suggests(typed: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(typed) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_group_word_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 2
    assert "kvkin config show FILE" in capsys.readouterr().out
    assert cli.main(["bench", "--help"]) == 0
    assert "kvkin bench router" in capsys.readouterr().out


LONG = {
    "bench serving": "cluster, load, model, agent workload, trace workload, comparison, limit, output",
    "bench engine": "model, size, run, output",
    "finetune": "task, output, method, training",
}
MOST_IN_A_GROUP = 9


@pytest.mark.parametrize("words", LONG)
def test_long_help_comes_in_groups_with_an_example_that_parses(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    groups: dict[str, int] = {}
    for line in said.splitlines():
        # boxes are drawn with other characters where the output takes no Unicode
        title, option = re.match(r"\W+([a-z ]+) options \W+$", line), re.match(r"\W --[a-z]", line)
        if title is not None:
            groups[title[1]] = 0
        elif option is not None:
            groups[list(groups)[-1]] += 1
    assert ", ".join(name for name, count in groups.items() if count) == LONG[words]
    assert max(groups.values()) <= MOST_IN_A_GROUP
    (example,) = [line for line in said.splitlines() if line.startswith("Example: ")]
    typed = shlex.split(example.removeprefix(f"Example: kvkin {words} "))
    module, name = cli.COMMANDS[words].target.split(":")
    assert hasattr(tyro.cli(getattr(importlib.import_module(module), name), args=typed), "run")


def test_version_names_what_decides_how_kv_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kvkin ")
    assert "transformers 5." in out


def test_missing_cluster_file_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "no/such.yaml"]) == 2
    assert capsys.readouterr().err == (
        "kvkin: no/such.yaml: no such file (allowed: a cluster file such as configs/clusters/local.yaml)\n"
    )


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [(NodeUnavailable("nobody is there"), 2, "kvkin: nobody is there\n"), (KeyboardInterrupt(), 130, "")],
)
def test_errors_become_one_line_and_a_code(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: cli.Command, arguments: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["status"]) == code
    assert capsys.readouterr().err == said


def test_log_level_is_taken_from_anywhere_but_after_two_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], str]] = []
    monkeypatch.setattr(logs, "setup_logging", lambda level: seen.append(([], level)))
    monkeypatch.setattr(cli, "_run", lambda command, arguments: seen.append((arguments, command.words)) or 0)
    cli.main(["--log-level", "debug", "status", "--json"])
    cli.main(["status", "--log-level=error"])
    cli.main(["ask", "m", "--", "--log-level", "x"])
    assert seen == [
        ([], "debug"),
        (["--json"], "status"),
        ([], "error"),
        ([], "status"),
        ([], "error"),
        (["m", "--", "--log-level", "x"], "ask"),
    ]


def test_unknown_log_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--log-level", "loud", "status"]) == 2
    assert "debug, info, warning, error" in capsys.readouterr().err


def test_logs_are_json_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("info")
    structlog.get_logger().info("serving", node="prefill-0", path=Path("x"))
    structlog.get_logger().debug("not shown")
    logging.getLogger("library").warning('said "%s"', "so")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["event"]) for line in lines] == [("info", "serving"), ("warning", 'said "so"')]
    assert lines[0]["node"] == "prefill-0"
    assert lines[1]["logger"] == "library"


def test_closed_pipe_is_no_traceback() -> None:
    code = (
        "import os, sys; from kvkin.tools import cli\n"
        "cli._run = lambda *_: [print('x' * 65536) for _ in range(64)] and 0\n"
        "sys.exit(cli.main(['status']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(30) == cli.EXIT_PIPE_CLOSED
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    code = (
        "import signal, sys; from kvkin.tools import cli\n"
        "cli._run = lambda *_: (print('here', flush=True), signal.pause())\n"
        "sys.exit(cli.main(['status']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "")


def test_lifeline_ends_a_child_whose_parent_is_gone() -> None:
    read_end, write_end = os.pipe()
    code = (
        "import signal; from kvkin.tools.lifeline import watch_parent\n"
        "watch_parent(); print('here', flush=True); signal.pause()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {lifeline.LIFELINE_VARIABLE: str(read_end)},
        pass_fds=[read_end],
        stdout=subprocess.PIPE,
    )
    os.close(read_end)
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"
    assert child.poll() is None
    os.close(write_end)
    began = time.monotonic()
    assert child.wait(lifeline.ORPHAN_GRACE_S) == -signal.SIGTERM
    assert time.monotonic() - began < lifeline.ORPHAN_GRACE_S
    child.stdout.close()


@pytest.mark.parametrize(
    "script", [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / ".ci" / "run"], ids=lambda p: p.name
)
def test_shell_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_launch_script_starts_its_role(role: str, tmp_path: Path) -> None:
    fake = tmp_path / "kvkin"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    script = LAUNCH / f"{role}.sh"
    environment = {"PATH": os.environ["PATH"], "KVKIN": str(fake), "CONFIG": "a b.yaml", "NODE": "n"}
    done = subprocess.run(
        [script, "--ready-file", "r"], check=False, env=environment, capture_output=True, text=True, timeout=10
    )
    assert done.stdout.splitlines() == [role, "--config", "a b.yaml", "--node", "n", "--ready-file", "r"]
    del environment["NODE"]
    done = subprocess.run([script], check=False, env=environment, capture_output=True, text=True, timeout=10)
    assert done.returncode != 0
    assert "set NODE" in done.stderr


def test_makefile_parses_and_lists_its_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    for target in ("demo", "test", "test-slow", "check", "clean"):
        assert f"make {target}" in done.stdout


def test_slurm_job_writes_real_addresses_and_starts_every_host(tmp_path: Path) -> None:
    fakes = {
        "scontrol": "printf 'node-a\\nnode-b\\n'",
        "getent": 'case $2 in node-a) echo "10.0.0.1 STREAM node-a";; *) echo "10.0.0.2 STREAM node-b";; esac',
        "srun": 'echo "srun $*"',
        "kvkin": 'echo "kvkin $*"',
    }
    for name, script in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    template = tmp_path / "template.yaml"
    template.write_text("a: {host: @HOST0@}\nb: {host: @HOST1@}\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]"}
    environment["SLURM_SUBMIT_DIR"] = str(tmp_path)
    command = ["bash", str(LAUNCH / "slurm.sbatch"), str(template)]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=20)
    config = tmp_path / "kvkin-7" / "cluster.yaml"
    assert config.read_text() == "a: {host: 10.0.0.1}\nb: {host: 10.0.0.2}\n"
    assert f"kvkin config check {config}" in done.stdout
    assert f"srun --kill-on-bad-exit=0 kvkin up {config} --restart" in done.stdout
    template.write_text("a: {host: @HOST2@}\n")
    refused = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=20)
    assert refused.returncode == 2
    assert "more hosts than the allocation has (2)" in refused.stderr

"""``kvkin ask MODEL TEXT``: stream an answer from a cluster and say what was reused for it.

Talks to a running cluster through ``transport/client.py``, or, with ``--local``, to one that it runs in its own process
(``tools/local.py``) for this one question.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tyro
from rich.console import Console

from kvkin.configs.loader import load_cluster
from kvkin.kv.errors import ConfigError
from kvkin.tools.decision_view import decision_view
from kvkin.tools.report_view import answer_report, headline
from kvkin.tools.router_address import DEFAULT_CONFIG, reach, router_address
from kvkin.transport.client import AsyncClient
from kvkin.transport.messages import Finished, Sampling

MAX_CONTEXT_FILE_BYTES = 8 << 20


@dataclass(frozen=True)
class Ask:
    """Ask a model of the cluster; streams the answer, then shows what was reused for it and where the time went.

    The text goes through the family's chat template as the user's message, after the context, unless --raw is given.

    kvkin ask smollm2-135m-qa "Who wrote it?" --context-file report.txt --reuse any

    kvkin ask --local --warm smollm2-135m-instruct smollm2-135m-qa "Who wrote it?" --context-file report.txt --reuse any
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Name of the model, as in the cluster file."""

    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """The question, or with --raw the end of the prompt."""

    context_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File whose text stands before the question; "-" reads standard input."""

    reuse: Literal["exact", "bounded", "any", "own", "off"] = "bounded"
    """What may be reused: only what gives the same result; also what a profile bounds; anything; only what the answering node holds
    of this model, as any engine does; or nothing."""

    max_loss: float = 0.05
    """Most loss of quality under "bounded", as profiles measure it."""

    slo: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Target for the time to first token: takes the plan of the least loss that keeps it. Default: the cluster's, if it has one."""

    max_tokens: int = 128
    """Most tokens of the answer."""

    temperature: float = 0.0
    """0 always takes the most likely token."""

    raw: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """No chat template: the model continues the context and the text as they are."""

    publish: bool = True
    """Keep the KV of prompt and answer for later requests."""

    warm: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="MODEL")] = ()
    """Let this model read the same prompt first, so that its KV can be reused. May be given several times."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Cluster file whose first router is asked; default: configs/clusters/local.yaml."""

    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Address of a router instead, such as tcp://10.0.0.1:5570."""

    local: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run the needed nodes of the cluster file in this process, for this question only."""

    verbose: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also show what the router went by when it chose the plan, and what else it weighed."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the answer and its reuse report, decision included, as one JSON object instead of streaming."""

    def run(self) -> int:
        if self.local and self.address is not None:
            raise ConfigError("--local", "given together with --address", "one of them")
        asked = self.request()
        return asyncio.run(self._ask_local(asked) if self.local else self._ask_cluster(asked))

    def request(self) -> dict[str, Any]:
        """What the client sends, apart from the model."""
        context = "" if self.context_file is None else read_context(self.context_file)
        asked: dict[str, Any] = {
            "reuse": self.reuse,
            "max_loss": self.max_loss,
            "ttft_slo_s": self.slo,
            "publish": self.publish,
            "sampling": Sampling(temperature=self.temperature, max_tokens=self.max_tokens),
        }
        if self.raw:
            asked["prompt"] = context + self.text
        else:
            asked["messages"] = [("user", f"{context.rstrip()}\n\n{self.text}" if context else self.text)]
        return asked

    async def _ask_cluster(self, asked: dict[str, Any]) -> int:
        router = router_address(self.config, self.address)
        async with AsyncClient(router.url) as client:
            await reach(client, router, "" if self.address else "--local asks without one")
            return await self._ask(client, asked)

    async def _ask_local(self, asked: dict[str, Any]) -> int:
        from kvkin.tools.local import LocalCluster
        from kvkin.tools.prepare import prepare_missing

        config = load_cluster(self.config or DEFAULT_CONFIG)
        prepare_missing(config)
        models = tuple(dict.fromkeys([*self.warm, self.model]))
        _note(f"loading {', '.join(models)} into this process ...")
        async with LocalCluster(config, models) as cluster:
            return await self._ask(cluster.client, asked)

    async def _ask(self, client: AsyncClient, asked: dict[str, Any]) -> int:
        console = Console(highlight=False, soft_wrap=True)
        for model in self.warm:
            first = asked | {"publish": True, "sampling": Sampling(max_tokens=1), "ttft_slo_s": None}
            warmed = await client.generate(model, **first)
            if not self.json:
                console.print(headline(warmed))
        if self.json:
            answer = await client.generate(self.model, **asked)
            print(
                msgspec.json.format(msgspec.json.encode({"model": self.model} | msgspec.to_builtins(answer))).decode()
            )
            return 0
        answer = await stream_answer(client, self.model, asked, _write)
        console.print("\n", answer_report(answer), sep="")
        if self.verbose and answer.report.inputs is not None:
            console.print(decision_view(answer.report.inputs))
        return 0


async def stream_answer(
    client: AsyncClient, model: str, asked: dict[str, Any], on_text: Callable[[str], None]
) -> Finished:
    """Ask, hand over the text as it comes, return the end."""
    async with client.stream(model, **asked) as stream:
        said = 0
        async for tokens in stream:
            on_text(tokens.text)
            said += len(tokens.text)
        assert stream.finished is not None, "a stream without an error ends with finished"
        on_text(stream.finished.text[said:])
        return stream.finished


def read_context(path: Path) -> str:
    """The text of a context file. Raises ConfigError."""
    try:
        if str(path) == "-":
            return sys.stdin.read()
        if path.stat().st_size > MAX_CONTEXT_FILE_BYTES:
            raise ConfigError(
                "--context-file", f"{path} is too large", f"at most {MAX_CONTEXT_FILE_BYTES} bytes of text"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("--context-file", f"cannot read {path}: {error.strerror}", "a text file, or -") from None
    except UnicodeDecodeError as error:
        raise ConfigError("--context-file", f"byte {error.start} of {path} is not UTF-8", "text in UTF-8") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

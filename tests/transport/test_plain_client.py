"""The client of ``plain_client.py`` against a router with a mock node: docs/protocol.md is enough."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import plain_client
import pytest
from mock_node import MockNode, choose_privately, make_settings, no_leaks

from kvkin.router.node import RouterNode


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    with no_leaks():
        yield


@pytest.fixture
async def cluster(nothing_leaks: None, tmp_path: Path) -> AsyncIterator[tuple[RouterNode, MockNode]]:
    async with (
        RouterNode(make_settings(tmp_path), choose=choose_privately) as router,
        MockNode(router.node_address, "d0", text="yes") as node,
    ):
        yield router, node


def test_the_client_knows_nothing_of_kvkin() -> None:
    tree = ast.parse(Path(plain_client.__file__).read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "functools", "msgpack", "operator", "typing", "zmq"}


async def test_the_protocol_is_enough(cluster: tuple[RouterNode, MockNode]) -> None:
    client = plain_client.PlainClient(cluster[0].client_address)
    await asyncio.to_thread(plain_client.ask_everything, client)
    client.close()


async def test_cancelling(cluster: tuple[RouterNode, MockNode]) -> None:
    cluster[1].mode = "stream"
    client = plain_client.PlainClient(cluster[0].client_address)
    await asyncio.to_thread(plain_client.stop_half_way, client)
    client.close()

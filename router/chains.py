"""Interned facts about blocks, so that the prefix index compares 512 blocks x 16 nodes by identity (router/index.py uses it).

A *chain* is one provenance on one node. What is held of a block is a :class:`Held`; which chains reach a block without a gap
from the start of the prompt is a :class:`State`, a set of :class:`Path`. Equal ones are one object: neighbouring blocks of a
context nearly always share both, so a whole prompt is a handful of states.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvkin.kv.provenance import Provenance

_REMEMBERED_MATCHES = 32  # per path

Layers = tuple[int, tuple[int, ...]]  # (kv_layers, e_layers)


class Run(msgspec.Struct, frozen=True):
    """Blocks [start_block, stop_block) of the prompt that a node holds under one provenance.

    KV of layers [0, kv_layers) and E at ``e_layers`` are there for *every* block of the run. ``order_id``: not computed yet,
    but ordered, so that it can be pulled live.
    """

    provenance: Provenance
    start_block: int
    stop_block: int
    kv_layers: int
    e_layers: tuple[int, ...]
    order_id: str = ""


class Match(msgspec.Struct, frozen=True):
    """A chain of blocks from the start of the prompt on one node; each run's provenance follows the one before.

    A node has several matches if it holds several chains, or if a shorter part of a chain has more layers of E or KV.
    """

    node: str
    runs: tuple[Run, ...]

    @property
    def num_blocks(self) -> int:
        return self.runs[-1].stop_block


class Chain:
    """One provenance on one node; hashed by identity. ``num_blocks`` counts the blocks that are held under it."""

    __slots__ = ("node", "num_blocks", "provenance")

    def __init__(self, node: str, provenance: Provenance) -> None:
        self.node, self.provenance, self.num_blocks = node, provenance, 0


class Held:
    """What is held of a block, by chain. ``starts`` are the token positions at which tainted chains of it begin."""

    __slots__ = ("layers", "minus", "plus", "starts")

    def __init__(self, layers: dict[Chain, Layers]) -> None:
        self.layers = layers
        self.starts = frozenset(chain.provenance.start for chain in layers if not chain.provenance.exact)
        self.plus: dict[tuple[Chain, Layers], Held] = {}
        self.minus: dict[Chain, Held] = {}


class Path:
    """A chain that is held without a gap from block ``start`` on, and before that ``prev``.

    ``kv_layers`` and ``e_layers`` are those of all its blocks so far. One object stands for all blocks that it reaches.
    """

    __slots__ = ("_matches", "before", "chain", "e_layers", "kv_layers", "prev", "start")

    def __init__(self, chain: Chain, start: int, layers: Layers, prev: Path | None) -> None:
        self.chain, self.start, self.prev = chain, start, prev
        self.kv_layers, self.e_layers = layers
        self.before: tuple[Run, ...] = () if prev is None else prev.runs(start)
        self._matches: dict[int, Match] = {}

    def runs(self, stop: int) -> tuple[Run, ...]:
        return (*self.before, Run(self.chain.provenance, self.start, stop, self.kv_layers, self.e_layers))

    def match(self, stop: int) -> Match:
        """The match that ends there; popular ones are made once."""
        found = self._matches.get(stop)
        if found is None:
            if len(self._matches) >= _REMEMBERED_MATCHES:
                self._matches.clear()
            found = self._matches[stop] = Match(self.chain.node, self.runs(stop))
        return found


class State:
    """The paths that reach a block, at most one per chain. ``next`` remembers the state of a child by what is held of it."""

    __slots__ = ("next", "paths")

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self.next: dict[Held, State] = {}


class StateTable:
    """Interns held facts, paths and states. ``compact`` forgets those that no block uses any more."""

    def __init__(self) -> None:
        self.nothing = Held({})
        self.unreached = State(())
        self._chains: dict[str, dict[bytes, Chain]] = {}
        self._held: dict[frozenset[tuple[Chain, Layers]], Held] = {frozenset(): self.nothing}
        self._paths: dict[tuple[Chain, int, Layers, Path | None], Path] = {}
        self._states: dict[tuple[Path, ...], State] = {(): self.unreached}

    def __len__(self) -> int:
        return len(self._held) + len(self._paths) + len(self._states)

    # --- chains ------------------------------------------------------------------------------------------------------

    def chain(self, node: str, provenance: Provenance) -> Chain:
        chains = self._chains.setdefault(node, {})
        found = chains.get(provenance.key)
        if found is None:
            found = chains[provenance.key] = Chain(node, provenance)
        return found

    def chains_of(self, node: str) -> list[Chain]:
        return list(self._chains.get(node, {}).values())

    def known_chain(self, node: str, key: bytes) -> Chain | None:
        return self._chains.get(node, {}).get(key)

    def count(self, chain: Chain, change: int) -> None:
        """Note that ``change`` more blocks are held under ``chain``; it is forgotten with its last block."""
        chain.num_blocks += change
        if chain.num_blocks == 0:
            chains = self._chains.get(chain.node, {})
            if chains.get(chain.provenance.key) is chain:
                del chains[chain.provenance.key]
                if not chains:
                    del self._chains[chain.node]

    # --- held facts --------------------------------------------------------------------------------------------------

    def add(self, held: Held, chain: Chain, layers: Layers) -> Held:
        found = held.plus.get((chain, layers))
        if found is None:
            found = held.plus[chain, layers] = self._intern({**held.layers, chain: layers})
        return found

    def remove(self, held: Held, chain: Chain) -> Held:
        found = held.minus.get(chain)
        if found is None:
            rest = {other: layers for other, layers in held.layers.items() if other is not chain}
            found = held.minus[chain] = self._intern(rest)
        return found

    def _intern(self, layers: dict[Chain, Layers]) -> Held:
        key = frozenset(layers.items())
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = Held(layers)
        return found

    # --- states ------------------------------------------------------------------------------------------------------

    def first(self, held: Held) -> State:
        """State of the first block of a prompt: exact chains, and tainted ones that begin there."""
        return self._state(
            self._path(chain, 0, layers, None)
            for chain, layers in held.layers.items()
            if chain.provenance.exact
            or (chain.provenance.start == 0 and chain.provenance.parent == chain.provenance.lineage_id)
        )

    def following(self, before: State, held: Held, position: int, depth: int) -> State:
        """State of a block at token ``position``, number ``depth`` of its prompt, after a block of state ``before``."""
        if position in held.starts:
            return self._state([*self._continued(before, held), *self._started(before, held, position, depth)])
        # where no chain starts, the result does not depend on the position
        found = before.next.get(held)
        if found is None:
            found = before.next[held] = self._state(self._continued(before, held))
        return found

    def _continued(self, before: State, held: Held) -> Iterable[Path]:
        for path in before.paths:
            layers = held.layers.get(path.chain)
            if layers is None:
                continue
            kv_layers, e_layers = layers
            if kv_layers >= path.kv_layers and e_layers == path.e_layers:
                yield path
                continue
            common = tuple(layer for layer in path.e_layers if layer in e_layers)
            yield self._path(path.chain, path.start, (min(kv_layers, path.kv_layers), common), path.prev)

    def _started(self, before: State, held: Held, position: int, depth: int) -> Iterable[Path]:
        for chain, layers in held.layers.items():
            provenance = chain.provenance
            if provenance.exact or provenance.start != position:
                continue
            for path in before.paths:
                if path.chain.node == chain.node and path.chain.provenance.key == provenance.parent:
                    yield self._path(chain, depth, layers, path)

    def _path(self, chain: Chain, start: int, layers: Layers, prev: Path | None) -> Path:
        key = (chain, start, layers, prev)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = Path(chain, start, layers, prev)
        return found

    def _state(self, paths: Iterable[Path]) -> State:
        # one order for one set: held facts that were learned in another order must not make another state
        key = tuple(sorted(paths, key=id))
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = State(key)
        return found

    # --- memory ------------------------------------------------------------------------------------------------------

    def compact(self, held: Iterable[Held], states: Iterable[State]) -> None:
        """Forget everything but ``held`` and ``states`` (what the blocks use) and the paths in them."""
        live_held = {id(one): one for one in held} | {id(self.nothing): self.nothing}
        live_states = {id(one): one for one in states} | {id(self.unreached): self.unreached}
        self._held = {frozenset(one.layers.items()): one for one in live_held.values()}
        self._states = {one.paths: one for one in live_states.values()}
        self._paths = {}
        for state in live_states.values():
            state.next.clear()
            for path in state.paths:
                self._keep(path)
        for one in live_held.values():
            one.plus.clear()
            one.minus.clear()

    def _keep(self, path: Path | None) -> None:
        while path is not None:
            self._paths[path.chain, path.start, (path.kv_layers, path.e_layers), path.prev] = path
            path = path.prev

"""Which arguments the installed vLLM's engine takes, and of which type: read from its source text.

Importing vllm takes 10 to 36 s and all of torch; the dataclass ``EngineArgs`` is plain source, so ``kvkin config check`` parses it
instead. Names of types are followed through vLLM's own imports; what cannot be followed takes anything, and vLLM judges it when the
node starts. ``tests/configs/test_vllm_installed.py`` compares the result with the imported dataclass.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARGUMENTS_FILE, ARGUMENTS_CLASS = "engine/arg_utils.py", "EngineArgs"
_SCALARS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "None": "null"}
_LISTS = ("list", "List", "set", "Set", "tuple", "Tuple", "frozenset", "Sequence")
_MAPPINGS = ("dict", "Dict", "Mapping")
# Python objects: nothing that a file could hold.
_OBJECTS = ("type", "Type", "Callable", "torch.dtype")
# An alias of an alias of ...: deeper than vLLM ever goes.
_MAX_DEPTH = 8


@dataclass(frozen=True)
class ArgumentType:
    """What an argument takes: kinds of values, and single values. Neither: anything."""

    kinds: frozenset[str] = frozenset()
    choices: tuple[object, ...] = ()
    # whether the argument is a Python set, which YAML has no plain form of
    is_set: bool = False
    anything: bool = False

    def __or__(self, other: ArgumentType) -> ArgumentType:
        choices = (*self.choices, *(choice for choice in other.choices if choice not in self.choices))
        return ArgumentType(
            self.kinds | other.kinds, choices, self.is_set or other.is_set, self.anything or other.anything
        )

    def takes(self, value: object) -> bool:
        """Whether ``value``, of a YAML file, is of this type. Whole numbers are numbers, true is none."""
        if self.anything:
            return True
        kind = "None" if value is None else type(value).__name__
        if kind in self.kinds or (kind == "int" and "float" in self.kinds):
            return True
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def words(self) -> str:
        """What it takes, for an error."""
        if self.anything:
            return "anything"
        words = {**_SCALARS, "list": "a list", "dict": "a mapping"}
        parts = [words[kind] for kind in words if kind in self.kinds and kind != "None"]
        if "str" not in self.kinds:
            parts += [str(choice) for choice in self.choices]
        return " or ".join([*parts, *(["null"] if "None" in self.kinds else [])])


ANYTHING = ArgumentType(anything=True)


def _kind(name: str) -> ArgumentType:
    return ArgumentType(frozenset({name}))


class EngineArguments:
    """The arguments of one installed vLLM. Types are worked out for those that are asked for: each may lead to other modules."""

    def __init__(self, module: _Module, annotations: dict[str, ast.expr]) -> None:
        self._module, self._annotations = module, annotations

    @property
    def names(self) -> list[str]:
        return list(self._annotations)

    def type_of(self, name: str) -> ArgumentType:
        """What the argument ``name``, one of ``names``, takes."""
        return self._module.type_of(self._annotations[name])


@functools.lru_cache(maxsize=4)
def read_arguments(folder: Path) -> EngineArguments | None:
    """The arguments of the vLLM in ``folder``; None if its source is not as expected (another version, or damaged).

    Kept for the process: the file has thousands of lines.
    """
    module = _Source(folder).module(folder / ARGUMENTS_FILE)
    body = None if module is None else module.classes.get(ARGUMENTS_CLASS)
    if module is None or body is None:
        return None
    annotations = {
        item.target.id: item.annotation
        for item in body.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    }
    return EngineArguments(module, annotations) if annotations else None


class _Source:
    """vLLM's modules, parsed when a name leads to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[Path, _Module | None] = {}

    def module(self, file: Path) -> _Module | None:
        if file not in self._modules:
            try:
                tree = ast.parse(file.read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                self._modules[file] = None
            else:
                self._modules[file] = _Module(self, tree)
        return self._modules[file]

    def named(self, dotted: str) -> _Module | None:
        """The module ``vllm.a.b``; None if it is not vLLM's."""
        first, *rest = dotted.split(".")
        if first != "vllm":
            return None
        path = self._folder.joinpath(*rest)
        return self.module(path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py")


class _Module:
    """One file: its classes, its aliases of types, and where its other names come from."""

    def __init__(self, source: _Source, tree: ast.Module) -> None:
        self._source = source
        self.classes: dict[str, ast.ClassDef] = {}
        self._aliases: dict[str, ast.expr] = {}
        self._imports: dict[str, tuple[str, str]] = {}
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._aliases.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self._aliases.setdefault(node.target.id, node.value)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    self._imports.setdefault(name.asname or name.name, (node.module, name.name))

    def type_of(self, node: ast.expr, depth: int = 0) -> ArgumentType:
        """The type that an annotation stands for."""
        if depth > _MAX_DEPTH:
            return ANYTHING
        if isinstance(node, ast.Constant):
            return self._constant(node, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.type_of(node.left, depth + 1) | self.type_of(node.right, depth + 1)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, depth)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(ast.unparse(node), depth)
        return ANYTHING

    def _constant(self, node: ast.Constant, depth: int) -> ArgumentType:
        if node.value is None:
            return _kind("None")
        if not isinstance(node.value, str):
            return ANYTHING
        try:
            return self.type_of(ast.parse(node.value, mode="eval").body, depth + 1)
        except SyntaxError:
            return ANYTHING

    def _subscript(self, node: ast.Subscript, depth: int) -> ArgumentType:
        name = ast.unparse(node.value).removeprefix("typing.")
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            whole = ArgumentType()
            for item in items:
                if isinstance(item, ast.Constant) and item.value is not None:
                    whole |= ArgumentType(choices=(item.value,))
                else:
                    whole |= self.type_of(item, depth + 1)
            return whole
        if name in ("Optional", "Union"):
            whole = _kind("None") if name == "Optional" else ArgumentType()
            for item in items:
                whole |= self.type_of(item, depth + 1)
            return whole
        if name == "Annotated":
            return self.type_of(items[0], depth + 1)
        return self._name(name, depth)

    def _name(self, name: str, depth: int) -> ArgumentType:
        if name in _SCALARS:
            return _kind(name)
        if name in _LISTS:
            return ArgumentType(frozenset({"list"}), is_set=name in ("set", "Set", "frozenset"))
        if name in _MAPPINGS:
            return _kind("dict")
        if name in _OBJECTS:
            return ArgumentType()
        if name in self.classes:
            # an enumeration is chosen by name, any other class of vLLM's configuration is made of a mapping
            bases = " ".join(ast.unparse(base) for base in self.classes[name].bases)
            if "IntEnum" in bases:
                return _kind("str") | _kind("int")
            return _kind("str" if "Enum" in bases else "dict")
        if name in self._imports:
            module, original = self._imports[name]
            found = self._source.named(module)
            return ANYTHING if found is None else found.type_of(ast.Name(original), depth + 1)
        if name in self._aliases:
            return self.type_of(self._aliases[name], depth + 1)
        return ANYTHING


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those below ``if TYPE_CHECKING`` and ``try`` included."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements(node.body)
        else:
            yield node

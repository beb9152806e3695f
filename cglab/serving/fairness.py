"""Arms are compared only if they are equal in all but what is compared. Pure functions.

Twice: what the arms are started with, before anything starts, and what the servers made of it, once they run. A server
chooses much by itself (sizes by free memory, a seed by chance), and the second check is what finds that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from cglab.errors import InputError
from cglab.serving.arm import ServerArm
from cglab.serving.installed import Installed
from cglab.serving.toggles import settings

SEED: Final = "--random-seed"
# What a server is told or finds out anew at every start.
_OF_A_START: Final = frozenset({"port", "nccl_port", "dist_init_addr", "startup_time", "launch_command"})
_SHOWN: Final = 6


def seeded(arm: ServerArm) -> tuple[str, ...]:
    """An arm's arguments with a fixed seed, which SGLang otherwise draws by chance at every start."""
    return arm.arguments if SEED in flags(arm.arguments) else (*arm.arguments, SEED, "0")


def flags(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Command line words by flag: ``--bs 1 2`` and ``--bs=1`` are both values of ``--bs``."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, assigned, value = word.partition("=")
            found[name] = (value,) if assigned else ()
        else:
            found[name] = (*found.get(name, ()), word)
    return found


def require_equal_arms(arms: Sequence[ServerArm], declared: Collection[str] = ()) -> None:
    """Nothing, if the arms differ in toggles and what is declared alone.

    Args:
        arms: the base first.
        declared: flags and variables that make the difference where no toggle does, such as a fork's own switch.

    Raises:
        InputError: for fewer than two arms, two of one name, or arms that differ in more; the difference is told.
    """
    names = [arm.name for arm in arms]
    if len(arms) < 2 or len(set(names)) != len(names):
        raise InputError(f"a comparison needs two arms or more, each of its own name, got {names}")
    base = _described(arms[0])
    for arm in arms[1:]:
        _refuse(arms[0].name, arm.name, _differences(base, _described(arm), declared), "--dtype of both arms")


def require_equal_servers(
    base: tuple[ServerArm, Mapping[str, Any]],
    other: tuple[ServerArm, Mapping[str, Any]],
    installed: Installed,
    declared: Collection[str] = (),
) -> None:
    """Nothing, if two servers resolved their arguments alike but for what their arms are to differ in.

    Args:
        base: an arm and its server's resolved arguments, as :class:`cglab.serving.scrape.Scrape` has them.
        other: the other arm's.
        installed: the version of both, which says what a toggle sets.
        declared: as in :func:`require_equal_arms`.

    Raises:
        InputError: if they differ in more; the difference is told.
    """
    ours, theirs = (flags(settings(arm.toggles, installed).arguments) for arm in (base[0], other[0]))
    compared = {
        *declared,
        *(flag for flag in ours.keys() | theirs.keys() if ours.get(flag) != theirs.get(flag)),
    }
    fields = {name.removeprefix("--").replace("-", "_") for name in compared}
    graphs = any("cuda_graph" in name for name in fields)
    differences = {
        name: values
        for name, values in _differences(base[1], other[1], fields | _OF_A_START).items()
        # One setting of graphs is resolved into several fields.
        if not (graphs and "cuda_graph" in name)
    }
    _refuse(base[0].name, other[0].name, differences, "the same --max-total-tokens and --mem-fraction-static")


def overruled(arm: ServerArm, resolved: Mapping[str, Any], installed: Installed) -> dict[str, str]:
    """Graph flags of an arm's toggles that its server took back, with what it made of them.

    SGLang does so by model, device and other arguments, and warns in its log alone; the arm is then not what it says.

    Args:
        arm: what was asked for.
        resolved: its server's resolved arguments.
        installed: the version, which says what a toggle sets.
    """
    asked = flags(settings(arm.toggles, installed).arguments)
    found: dict[str, str] = {}
    for phase in ("decode", "prefill"):
        flag, config = f"--cuda-graph-backend-{phase}", resolved.get("cuda_graph_config")
        told = config.get(phase) if isinstance(config, Mapping) else None
        made = told.get("backend") if isinstance(told, Mapping) else None
        if flag in asked and made is not None and asked[flag] != (made,):
            found[flag] = str(made)
    return found


def _described(arm: ServerArm) -> dict[str, Any]:
    return {
        "model": arm.model, "device": arm.device, "python": str(arm.python),
        **flags(arm.arguments), **arm.environment,
    }  # fmt: skip


def _differences(
    base: Mapping[str, Any], other: Mapping[str, Any], allowed: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    return {
        name: (base.get(name), other.get(name))
        for name in sorted(base.keys() | other.keys())
        if name not in allowed and base.get(name) != other.get(name)
    }


def _refuse(base: str, other: str, differences: Mapping[str, tuple[Any, Any]], example: str) -> None:
    if not differences:
        return
    told = "; ".join(
        f"{name}: {ours!r} and {theirs!r}" for name, (ours, theirs) in list(differences.items())[:_SHOWN]
    )
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise InputError(
        f"arms {base} and {other} differ in more than what is compared: {told}{more}. Make them equal, such as by "
        f"giving {example}, or declare the difference as what is compared"
    )

"""The ten techniques as a table: toggle, values, default, and where each is built and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cglab.errors import ToggleError, no_such
from cglab.settings import DSA_ATTENTION_SWITCH, DSA_INDEXER_SWITCH, NEXTN_SWITCH, SEED_GRAPH_SWITCH


@dataclass(frozen=True, slots=True)
class Technique:
    """One thing that can be captured.

    Attributes:
        id: T1 to T10.
        name: the toggle's name.
        text: what is captured.
        values: what the toggle may be.
        default: its value where nothing else is said.
        source: the source documents.
        module: where it is built.
        notebook: where it is shown.
        kill_switch: environment variable that switches it off.
    """

    id: str
    name: str
    text: str
    values: tuple[str, ...]
    default: str
    source: str
    module: str
    notebook: str
    kill_switch: str | None = None

    def check(self, value: str) -> str:
        """``value`` if the toggle may have it.

        Raises:
            ToggleError: for an unknown value.
        """
        if value not in self.values:
            raise ToggleError(f"{self.name}={value!r} is no setting; good values: {', '.join(self.values)}")
        return value

    def as_dict(self) -> dict[str, Any]:
        """One row of ``cglab techniques --json``; ``available`` and ``reason`` are for who reads other versions too."""
        return {
            "id": self.id, "name": self.name, "toggle": self.name, "text": self.text, "values": list(self.values),
            "default": self.default, "source": self.source, "kill_switch": self.kill_switch, "module": self.module,
            "notebook": self.notebook, "available": True, "reason": None,
        }  # fmt: skip


DRAFTING = ("verify", "draft_loop", "seed_step", "draft_sampler")
"""Those that need a draft model."""

SPARSE = ("dsa_attention", "dsa_indexer_prep")
"""Those of the prefill of a model with latent attention."""

_BACKENDS = ("full", "breakable", "eager")
_GRAPH = ("graph", "eager")
_SPECULATION = "notebooks/03_frozen_kv_mtp.ipynb"
_SPARSE = "notebooks/07_dsa_prefill.ipynb"

TECHNIQUES: Mapping[str, Technique] = {
    t.name: t
    for t in (
        Technique(
            "T1", "decode", "decode step, padded buckets or exact sizes", _BACKENDS, "full", "S1",
            module="cglab.runners.decode", notebook="notebooks/01_decode_graphs.ipynb",
        ),
        Technique(
            "T2", "verify", "target verify of drafted tokens", _BACKENDS, "full", "S0, S1",
            module="cglab.runners.verify", notebook=_SPECULATION,
        ),
        Technique(
            "T3", "draft_loop", "recurrent draft loop", _BACKENDS, "full", "S0, S1",
            module="cglab.runners.draft_loop", notebook=_SPECULATION,
        ),
        Technique(
            "T4", "seed_step", "assistant seed step", ("graph", "fused", "eager"), "graph", "S0",
            module="cglab.runners.seed_step", notebook=_SPECULATION, kill_switch=SEED_GRAPH_SWITCH,
        ),
        Technique(
            "T5", "draft_sampler", "greedy draft sampling inside the draft graph", _GRAPH, "graph", "S4",
            module="cglab.runners.draft_sampler", notebook="notebooks/04_dflash_sampler.ipynb",
        ),
        Technique(
            "T6", "prefill", "prefill body, eager attention breaks", _BACKENDS, "breakable", "S1-S3",
            module="cglab.runners.prefill", notebook="notebooks/02_prefill_and_requests.ipynb",
        ),
        Technique(
            "T7", "pp_prefill", "prefill of a pipeline stage, proxy tensors", ("off", "breakable"), "off", "S2",
            module="cglab.runners.pipeline_stage", notebook="notebooks/05_pipeline_prefill.ipynb",
        ),
        Technique(
            "T8", "dsa_attention", "sparse prefill attention inside the prefill graph", _GRAPH, "graph", "S3",
            module="cglab.runners.dsa_prefill", notebook=_SPARSE, kill_switch=DSA_ATTENTION_SWITCH,
        ),
        Technique(
            "T9", "dsa_indexer_prep", "indexer preparation and index-K store inside it",
            ("graph", "auto", "eager"), "graph", "S3",
            module="cglab.runners.dsa_prefill", notebook=_SPARSE, kill_switch=DSA_INDEXER_SWITCH,
        ),
        Technique(
            "T10", "draft_extend", "NextN draft extend replayed as a prefill graph", _GRAPH, "graph", "S3",
            module="cglab.runners.draft_extend", notebook=_SPARSE, kill_switch=NEXTN_SWITCH,
        ),
    )
}  # fmt: skip


def technique(name: str) -> Technique:
    """The technique of a toggle's name.

    Raises:
        ToggleError: for an unknown name, listing the good ones.
    """
    if name not in TECHNIQUES:
        raise ToggleError(no_such("technique", name, TECHNIQUES))
    return TECHNIQUES[name]


def check_arms(name: str, arms: Sequence[str]) -> list[str]:
    """The arms of a comparison: values of one toggle, each once.

    Raises:
        ToggleError: for an unknown toggle or value, or one that is given twice.
    """
    checked = [technique(name).check(arm) for arm in arms]
    if len(set(checked)) != len(checked):
        raise ToggleError(f"arms are compared with each other, each once; got {checked}")
    return checked


class Captures:
    """The toggles of a lab, as attributes: ``lab.captures.decode = "full"``.

    A bad name or value raises ToggleError and changes nothing.

    Args:
        inert: why a toggle would change nothing, by its name; such a toggle keeps its default.
    """

    _values: dict[str, str]
    _inert: Mapping[str, str]

    def __init__(self, inert: Mapping[str, str] = MappingProxyType({})) -> None:
        values = {t.name: t.default for t in TECHNIQUES.values()}
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_inert", inert)

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._values[technique(name).name]

    def __setattr__(self, name: str, value: str) -> None:
        checked = technique(name).check(value)
        if name in self._inert and checked != self._values[name]:  # what it is already may be put back
            raise ToggleError(f"{name}={value!r} would change nothing here: it {self._inert[name]}")
        self._values[name] = checked

    def as_dict(self) -> dict[str, str]:
        """All ten toggles."""
        return dict(self._values)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self._values.items())
        return f"Captures({shown})"

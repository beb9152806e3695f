"""One recipe a source document: how it measured, and the same question at a scale that is at hand. Data, not code.

``data/recipes/*.toml`` has for each source what SGLang cannot toggle of it, and up to three variants: ``published``
with the source's own model, arguments and workload, ``gpu`` for one GPU with random weights, and ``cpu`` with the
shipped model, where there are no graphs and a comparison shows that all of it works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cglab.errors import InputError, no_such
from cglab.models.presets import PRESETS
from cglab.serving.arm import ServerArm, vocabulary_of
from cglab.serving.random_weights import RANDOM_WEIGHTS, write_folder
from cglab.serving.workload import LANE_OFFSET, Workload, point

VARIANTS: Final = ("published", "gpu", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What sets one arm apart.

    Attributes:
        name: of the arm.
        toggles: the lab's toggles.
        environment: variables, where no toggle does it.
    """

    name: str
    toggles: Mapping[str, str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load, in S3's terms.

    Attributes:
        new_tokens, output_tokens, concurrency, cached, count: as :func:`cglab.serving.workload.point` takes them.
        published: the source's row by measure: ``table``, and ``where`` with the cells that name the row.
    """

    new_tokens: int
    output_tokens: int
    concurrency: int
    cached: int = 0
    count: int | None = None
    published: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft model of random weights.

    Attributes:
        shape: a preset.
        layers: of it; None for all.
        config: further fields of its ``config.json``.
    """

    shape: str
    layers: int | None = None
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A recipe at one scale.

    Attributes:
        hardware: what it needs.
        gpus: that a server runs on; 0 on a CPU.
        model: a shipped model, a hub id, or a preset, which has random weights.
        dtype: of the weights.
        vocabulary: token ids are drawn below it.
        arguments: of every server.
        environment: of every server.
        declared: flags and variables that make the difference where no toggle does.
        arms: the base first.
        points: the loads.
        lane_offset: seconds between the starts of two lanes.
        draft: a draft model of random weights, if one is needed.
        note: what a reader must know.
    """

    hardware: str
    gpus: int
    model: str
    dtype: str
    vocabulary: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    declared: tuple[str, ...]
    arms: tuple[Arm, ...]
    points: tuple[Point, ...]
    lane_offset: float = LANE_OFFSET
    draft: Draft | None = None
    note: str = ""

    @property
    def random(self) -> bool:
        """Whether its weights are random."""
        return self.model in PRESETS

    def of(self, model: str) -> Variant:
        """The same with another model; where that is at hand, ids are drawn below the smaller vocabulary of both.

        An id that a model does not have ends the server that gets it. The config of a hub id is not fetched for this.

        Args:
            model: as :attr:`model`.

        Raises:
            ModelError: as :func:`cglab.serving.arm.vocabulary_of`.
        """
        known = vocabulary_of(model)
        return replace(self, model=model, vocabulary=min(self.vocabulary, known or self.vocabulary))

    def server_arms(self, folder: str | Path, python: Path | None = None) -> tuple[ServerArm, ...]:
        """The arms, ready to launch; folders of random weights are written first.

        Args:
            folder: where to.
            python: that has SGLang; None for the one that is found.
        """
        model, words = self.model, list(self.arguments)
        if self.random:
            model = str(write_folder(PRESETS[self.model], Path(folder) / self.model, self.dtype))
            words += RANDOM_WEIGHTS
        if self.draft is not None:
            words += ["--speculative-draft-model-path", str(self._write_draft(Path(folder)))]
            words += ["--speculative-draft-load-format", "dummy"]
        return tuple(
            ServerArm(
                arm.name, model, arm.toggles, ("--dtype", self.dtype, *words), {**self.environment, **arm.environment},
                python, "cuda" if self.gpus else "cpu",
            )
            for arm in self.arms
        )  # fmt: skip

    def workloads(self) -> tuple[Workload, ...]:
        """The points as loads, in order."""
        return tuple(
            point(
                each.new_tokens, each.output_tokens, each.concurrency, vocabulary=self.vocabulary,
                cached=each.cached, count=each.count, lane_offset=self.lane_offset,
            )
            for each in self.points
        )  # fmt: skip

    def published_figures(
        self, tables: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """The source's own figures, by point, then by measure: ``base``, ``other`` and ``change``.

        Args:
            tables: from :func:`cglab.measure.published.load_published`.

        Raises:
            InputError: if a point names a table or a row that is not there, or more than one.
        """
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for each, workload in zip(self.points, self.workloads(), strict=True):
            for measure, told in each.published.items():
                if told["table"] not in tables:
                    raise InputError(
                        f"there is no published table {told['table']!r}; `cglab published` lists them"
                    )
                rows = [
                    row for row in tables[told["table"]]["rows"]
                    if all(row.get(column) == value for column, value in told["where"].items())
                ]  # fmt: skip
                if len(rows) != 1:
                    raise InputError(f"{told['where']} names {len(rows)} rows of {told['table']}; name one")
                row = rows[0]
                figures = {"base": row["baseline"], "other": row["captured"], "change": row.get("change")}
                found.setdefault(workload.name, {})[measure] = figures
        return found

    def _write_draft(self, folder: Path) -> Path:
        assert self.draft is not None  # noqa: S101 - the caller looked
        shape = PRESETS[self.draft.shape]
        if self.draft.layers is not None:
            shape = replace(shape, num_layers=self.draft.layers)
        place = write_folder(shape, folder / "draft", self.dtype)
        file = place / "config.json"
        file.write_text(
            json.dumps({**json.loads(file.read_text("utf-8")), **self.draft.config}, indent=2), "utf-8"
        )
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one source measured.

    Attributes:
        name: the file's name.
        source: S0 to S4.
        techniques: T1 to T10.
        title: in one line.
        tables: published tables that its results stand beside.
        cannot: what SGLang 0.5.16 and 0.5.23 cannot toggle of it, and what is done instead.
        client: how the source drove its servers.
        variants: by name, some of :data:`VARIANTS`.
    """

    name: str
    source: str
    techniques: tuple[str, ...]
    title: str
    tables: tuple[str, ...]
    cannot: tuple[str, ...]
    client: str
    variants: Mapping[str, Variant]

    def variant(self, name: str) -> Variant:
        """One of its variants.

        Raises:
            InputError: if it has none of that name.
        """
        if name not in self.variants:
            raise InputError(no_such(f"variant of recipe {self.name}", name, self.variants))
        return self.variants[name]

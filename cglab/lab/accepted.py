"""What became of drafts, side by side: how many tokens a verify pass committed, and what its width cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cglab.engine.generation import Generation
from cglab.errors import InputError
from cglab.lab.views import draw

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Accepted:
    """Speculative runs of the same prompts, by what tells them apart.

    Attributes:
        runs: by name.

    Raises:
        InputError: for a run without drafts.
    """

    runs: Mapping[str, Generation]

    def __post_init__(self) -> None:
        plain = [name for name, run in self.runs.items() if run.accepted is None]
        if plain:
            raise InputError(f"{plain[0]} drafted nothing; open the model with draft= and generate again")

    def as_frame(self) -> pandas.DataFrame:
        """One row a run: the three flavours of accept length, passes, and the median step in milliseconds."""
        import pandas

        rows = []
        for name, run in self.runs.items():
            told = run.accepted.as_dict() if run.accepted is not None else {}
            step = run.timings.median_step
            shares = {f"share of {length}": share for length, share in told.pop("distribution").items()}
            rows.append({"run": name, **told, "step_ms": None if step is None else step * 1e3, **shares})
        return pandas.DataFrame(rows)

    def plot(self) -> Any:
        """Shares of verify passes by the tokens that they committed, a plotly figure."""
        return draw("accepted", self)


@dataclass(frozen=True)
class PromptParity:
    """Outputs of the same prompts from two runs.

    Attributes:
        total: prompts.
        matched: that have the same tokens.
        departed: of each that has not, the place of the first other token.
    """

    total: int
    matched: int
    departed: tuple[int, ...]

    def __str__(self) -> str:
        where = f"; they part after {', '.join(map(str, self.departed))} tokens" if self.departed else ""
        return f"{self.matched} of {self.total} prompts equal{where}"


def prompt_parity(run: Generation, reference: Generation) -> PromptParity:
    """Compares a run with another one, prompt by prompt, as S0 does.

    Raises:
        InputError: for runs of other numbers of prompts.
    """
    if len(run.tokens) != len(reference.tokens):
        raise InputError(
            f"{len(run.tokens)} outputs and {len(reference.tokens)} cannot be compared; generate from the same prompts"
        )
    departed = []
    for one, other in zip(run.tokens, reference.tokens, strict=True):
        if one != other:
            pairs = zip(one, other, strict=False)
            same = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
            departed.append(same)
    return PromptParity(len(run.tokens), len(run.tokens) - len(departed), tuple(departed))

"""Whether answers are as good: SGLang's own few-shot harness on a local file, several times for each arm.

A score moves from run to run of one and the same arm (0.3 to 1.3 points in S3, for batches that fill differently),
so it is taken with both orders of the questions and on several servers, and its range is told beside it: what lies
within the range is no difference.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from cglab.errors import InputError, ServerError, no_such
from cglab.serving.arm import ServerArm, plain_environment
from cglab.serving.compare import Launch
from cglab.serving.endpoint import Endpoint, with_key
from cglab.serving.installed import ask, find_python
from cglab.serving.scrape import scrape
from cglab.serving.server import launch

TASKS: Final[Mapping[str, str]] = {"gsm8k": "sglang.test.few_shot_gsm8k"}
"""Harnesses that both known versions have."""
FEWEST_INSTANCES: Final = 2
SCRIPT: Final = Path(__file__).with_name("scripts") / "few_shot.py"


@dataclass(frozen=True, slots=True)
class Score:
    """How well an arm answers.

    Attributes:
        arm: its name.
        task: what was asked.
        questions: of each run.
        runs: share of right answers, both orders of every instance.
        invalid: largest share of answers without a number.
        accept_length: tokens that a verify pass commits, the mean over instances; None without drafts.
    """

    arm: str
    task: str
    questions: int
    runs: tuple[float, ...]
    invalid: float
    accept_length: float | None

    @property
    def score(self) -> float:
        """Mean share of right answers."""
        return mean(self.runs)

    @property
    def spread(self) -> float:
        """Best run less worst: what one arm differs from itself."""
        return max(self.runs) - min(self.runs)

    def differs_from(self, other: Score) -> bool:
        """Whether the means lie further apart than either arm's own runs do.

        Raises:
            InputError: if they are of other tasks or numbers of questions.
        """
        ours, theirs = (self.task, self.questions), (other.task, other.questions)
        if ours != theirs:
            raise InputError(f"{self.arm} was asked {ours}, {other.arm} {theirs}; ask both the same")
        return abs(self.score - other.score) > max(self.spread, other.spread)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "score": self.score, "spread": self.spread}

    def __str__(self) -> str:
        drafts = "" if self.accept_length is None else f", accept length {self.accept_length:.3f}"
        return (
            f"{self.arm}: {self.score:.2%} of {self.questions} right in {len(self.runs)} runs, "
            f"range {self.spread * 100:.2f} points{drafts}"
        )


def evaluate(
    arm: ServerArm,
    task: str,
    questions: int,
    shots: int,
    *,
    data: str | Path,
    folder: str | Path,
    instances: int = FEWEST_INSTANCES,
    new_tokens: int = 512,
    parallel: int = 4,
    deadline: float = 1800.0,
    start: Launch = launch,
) -> Score:
    """Scores one arm: two servers or more, each with the questions forward and backward.

    Args:
        arm: the arm.
        task: one of :data:`TASKS`.
        questions: from the head of the file.
        shots: solved examples before each question: the first of the file, in both orders. SGLang's harness asks these
            too, with their answers before it, so a score is a little too high for all arms alike.
        data: JSON lines with ``question`` and ``answer``. Nothing is downloaded.
        folder: for logs and ordered data.
        instances: servers, at least 2.
        new_tokens: most of an answer.
        parallel: requests in flight.
        deadline: seconds for a server's start and for its runs.
        start: what starts a server.

    Raises:
        InputError: an unknown task or one that this version lacks, too few instances, a file with too few questions.
        ServerError: if a server or the harness fails.
    """
    if task not in TASKS:
        raise InputError(no_such("task", task, TASKS))
    if instances < FEWEST_INSTANCES:
        raise InputError(f"instances={instances}; a score needs {FEWEST_INSTANCES} servers to tell its range")
    installed = ask(find_python(arm.python))
    if TASKS[task] not in installed.modules:
        raise InputError(f"{task} is not available in SGLang {installed.version}: it has no {TASKS[task]}")
    place = Path(folder).resolve()
    files = _orders(Path(data), questions, shots, place)
    runs: list[dict[str, float]] = []
    accepted: list[float] = []
    for instance in range(instances):
        with start(arm, log_folder=str(place / f"{arm.name}-{instance + 1}"), deadline_s=deadline) as server:
            # One question first, so that every run finds the examples in the cache.
            asked = [f"{files[0]}:1:1", *(f"{file}:{questions}:{parallel}" for file in files)]
            runs += _run(server, task, [new_tokens, shots, *asked], place, deadline)[1:]
            length = scrape(server).accept_length
            accepted += [] if length is None else [length]
    return Score(
        arm.name, task, questions, tuple(run["accuracy"] for run in runs), max(run["invalid"] for run in runs),
        mean(accepted) if accepted else None,
    )  # fmt: skip


def _orders(data: Path, questions: int, shots: int, folder: Path) -> tuple[Path, Path]:
    """The questions forward and backward, the examples before them the same."""
    try:
        lines = [line for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
        whole = all({"question", "answer"} <= json.loads(line).keys() for line in lines)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{data} cannot be read as JSON lines of question and answer: {error}") from error
    if not whole or not 0 <= shots < questions <= len(lines):
        raise InputError(
            f"{data} has {len(lines)} lines; asked are {questions} questions, the first {shots} of them solved "
            "examples: give fewer, or a file of lines with question and answer"
        )
    folder.mkdir(parents=True, exist_ok=True)
    head, rest = lines[:shots], lines[shots:questions]
    forward, backward = folder / "forward.jsonl", folder / "backward.jsonl"
    if data.resolve() in (forward, backward):
        raise InputError(
            f"{data} would be written over by its own head; give another folder, or move the file"
        )
    forward.write_text("\n".join([*head, *rest, ""]), encoding="utf-8")
    backward.write_text("\n".join([*head, *rest[::-1], ""]), encoding="utf-8")
    return forward, backward


def _run(
    server: Endpoint, task: str, asked: Sequence[object], folder: Path, deadline: float
) -> list[dict[str, float]]:
    """Scores of several runs, in order."""
    words = [str(server.installed.python), str(SCRIPT), TASKS[task], server.url]
    try:
        answer = subprocess.run(
            [*words, *map(str, asked)], cwd=folder, capture_output=True, text=True, timeout=deadline, check=False,
            stdin=subprocess.DEVNULL, env=with_key(server, plain_environment(os.environ)),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ServerError(
            f"the harness of {task} did not end within {deadline:g} s; the server's last lines:",
            fault="too late", log_lines=server.log_tail(),
        ) from error  # fmt: skip
    if answer.returncode:
        raise ServerError(
            f"the harness of {task} ended with status {answer.returncode}. Its last lines:",
            fault="the harness failed", log_lines=answer.stderr.splitlines()[-12:],
        )  # fmt: skip
    found: list[dict[str, float]] = json.loads(answer.stdout.splitlines()[-1])
    return found

"""One arm of a comparison of servers, and the command that starts it. Pure: nothing is started here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cglab.errors import InputError, ModelError, ToggleError
from cglab.models.presets import PRESETS
from cglab.models.sources import HUB_NAME, shipped_models
from cglab.serving.installed import Installed
from cglab.serving.toggles import settings
from cglab.settings import user_path

DEVICES: Final = ("cuda", "cpu")
LOOPBACK: Final = "127.0.0.1"
SECRETS: Final = ("--api-key", "--admin-api-key")
"""Arguments that no arm may have: its command line and its records would tell them. Each server gets a key of its own,
which others on this machine do not have. SGLang asks for it everywhere but where a path begins with ``/health``,
``/metrics`` or, in 0.5.23, ``/ready``: anyone here may ask ``/health_generate``, which generates a token."""
KEY: Final = "CGLAB_SERVER_KEY"
"""The variable in which ``scripts/start_server.py`` is handed the key."""
KEYLESS: Final = ("--grpc-port", "--grpc-mode", "--smg-grpc-mode", "--tokenizer-worker-num")
"""Arguments beside which SGLang refuses a key: loopback alone protects a server that has one of them."""
START: Final = Path(__file__).parent / "scripts" / "start_server.py"
SHIM: Final = Path(__file__).parent / "shim"
OURS: Final = ("--host", "--port", "--model-path", "--model", "--device")
"""Arguments that the lab gives itself."""

# What a server on a CPU without AMX needs to start, and sizes that leave the machine usable.
_CPU: Final = (
    ("--attention-backend", "torch_native"), ("--sampling-backend", "pytorch"),
    ("--cuda-graph-backend-decode", "disabled"), ("--grammar-backend", "none"), ("--mem-fraction-static", "0.3"),
    ("--max-total-tokens", "8192"), ("--max-running-requests", "8"), ("--disable-overlap-schedule", None),
)  # fmt: skip


_GRAPHS: Final = ("decode", "verify", "draft_loop", "prefill", "pp_prefill")
"""Toggles that choose graphs of a server."""


@dataclass(frozen=True, slots=True)
class ServerArm:
    """A server of a comparison; all that it is started with.

    Attributes:
        name: of the arm, for tables and for its log; letters, digits, ``-``, ``_`` and ``.``.
        model: a shipped model's name, a Hugging Face folder, or a hub id.
        toggles: the lab's toggles with their values; what is left out stays as SGLang has it.
        arguments: further arguments of ``sglang.launch_server``, as on its command line.
        environment: variables of the server's own; an ``SGLANG_`` variable of this process is not handed on.
        python: the Python that starts it; None for the one that ``find_python`` finds.
        device: ``cuda``, or ``cpu``: without graphs, for what does not need speed; None leaves it to SGLang.
    """

    name: str
    model: str
    toggles: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if not self.name or not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise InputError(
                f"{self.name!r} names no arm: letters, digits, '-', '_' and '.' do, as in 'decode-full'"
            )
        if self.device is not None and self.device not in DEVICES:
            raise InputError(
                f"device={self.device!r} of arm {self.name}; good values: {', '.join(DEVICES)} or None"
            )
        for toggle in _GRAPHS:
            if self.device == "cpu" and self.toggles.get(toggle, "eager") not in ("eager", "off"):
                raise ToggleError(
                    f"a server on a CPU has no CUDA graphs; leave {toggle} out or make it eager"
                )
        if isinstance(self.arguments, str) or not all(isinstance(word, str) for word in self.arguments):
            raise InputError(
                f"arguments={self.arguments!r} of arm {self.name}; give a tuple of words, as in ('--tp-size', '2')"
            )
        for variable, value in self.environment.items():
            if not isinstance(value, str) or "\0" in value or not variable.isidentifier():
                raise InputError(
                    f"{variable}={value!r} in the environment of arm {self.name} is no variable with a text; give such"
                )
        # Frozen all the way down, so that an arm can be compared and kept beside its results.
        object.__setattr__(self, "arguments", tuple(self.arguments))
        object.__setattr__(self, "toggles", MappingProxyType(dict(self.toggles)))
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))


@dataclass(frozen=True, slots=True)
class Command:
    """What is run.

    Attributes:
        argv: the program and its arguments.
        environment: every variable that it gets.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


def command(
    arm: ServerArm, installed: Installed, port: int, inherited: Mapping[str, str] | None = None
) -> Command:
    """The command that starts an arm's server on loopback.

    Args:
        arm: the arm.
        installed: the version that it is for, which is asked about every flag and variable.
        port: where it listens.
        inherited: variables to start from; this process's own if left out. What would make an arm another one than
            it says is taken out: ``SGLANG_``, ``CGLAB_``, ``PYTHON`` but its path, and Triton's interpreter.

    Raises:
        InputError: this version lacks an argument, variable or value, or one is given twice; near matches are named.
        ToggleError: this version has no switch for a toggle.
        ModelError: there is no such model.
    """
    if secret := sorted({word.partition("=")[0] for word in arm.arguments} & set(SECRETS)):
        raise InputError(
            f"{secret[0]} of arm {arm.name} would stand in its command line and its records; leave it out: the server "
            f"listens on {LOOPBACK} alone, with a key of its own"
        )
    if any(word.partition("=")[0] == "--config" for word in arm.arguments):
        raise InputError(
            f"--config of arm {arm.name} names a file whose arguments no check and no record would see; give them as "
            "words"
        )
    toggled = settings(arm.toggles, installed)
    given = tuple(_check(arm.arguments, installed))
    if clash := sorted(set(given) & {*OURS, *toggled.arguments[::2]}):
        raise InputError(
            f"{clash[0]} of arm {arm.name} is given by the lab itself; use its field or toggle instead"
        )
    if clash := sorted(set(arm.environment) & set(toggled.environment)):
        raise InputError(f"{clash[0]} of arm {arm.name} is what one of its toggles sets; drop one of the two")
    for name in arm.environment:
        installed.check_variable(name)
    model = model_path(arm.model)
    argv = [str(installed.python), str(START), "--model-path", model]
    argv += [
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        *([] if "--enable-metrics" in given else ["--enable-metrics"]),
    ]
    if arm.device is not None:
        argv += ["--device", arm.device]
    if arm.device == "cpu":
        taken = {*given, *toggled.arguments[::2]}
        argv += [
            part for flag, value in _CPU if flag not in taken for part in (flag, value) if part is not None
        ]
    argv += [*toggled.arguments, *arm.arguments]
    environment = plain_environment(os.environ if inherited is None else inherited)
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"  # a folder has all that is needed
    environment |= {**toggled.environment, **arm.environment}
    if arm.device == "cpu":
        own = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{SHIM}{os.pathsep}{own}" if own else str(SHIM)
    return Command(tuple(argv), environment)


def takes_key(arm: ServerArm) -> bool:
    """Whether SGLang lets a server of these arguments have a key; one tokenizer process is no several."""
    for place, word in enumerate(arm.arguments):
        flag, assigned, value = word.partition("=")
        if flag in KEYLESS and (value if assigned else "".join(arm.arguments[place + 1 : place + 2])) != "1":
            return False
    return True


def model_path(model: str) -> str:
    """What SGLang is given for a model: an absolute folder, or a hub id as it is.

    Raises:
        ModelError: it is neither, or the folder has no ``config.json``.
    """
    shipped = shipped_models()
    folder = shipped.get(model) or user_path(model)
    if model and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{folder} has no config.json: a Hugging Face model folder is expected; check the path"
            )
        return str(folder.resolve())
    if HUB_NAME.fullmatch(model):
        return model
    if model in PRESETS:
        raise ModelError(
            f"{model} is a shape without weights; make a folder of it with cglab.serving.random_weights.write_folder"
        )
    raise ModelError(
        f"no model {model!r}: it is no shipped model ({', '.join(shipped)}), no folder and no hub id (owner/name)"
    )


def vocabulary_of(model: str) -> int | None:
    """Tokens of a shape's or folder's vocabulary; None for a hub id, as nothing is fetched for this.

    Raises:
        ModelError: there is no such model, or its ``config.json`` names no vocabulary.
    """
    if model in PRESETS:
        return PRESETS[model].vocab_size
    file = Path(model_path(model)) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} names no vocab_size ({error!r}); correct it") from error


def _check(arguments: Sequence[str], installed: Installed) -> Iterator[str]:
    """The flags among arguments, each once, with a good value.

    Raises:
        InputError: as :func:`command`.
    """
    seen: set[str] = set()
    for place, text in enumerate(arguments):
        if not text.startswith("--"):
            continue
        flag, assigned, value = text.partition("=")
        argument = installed.argument(flag)
        if flag in seen:
            raise InputError(f"{flag} is given twice; give it once")
        seen.add(flag)
        following = value if assigned else next(iter(arguments[place + 1 : place + 2]), None)
        if argument.takes_value and argument.choices is not None and following not in argument.choices:
            raise InputError(
                f"{flag} of SGLang {installed.version} cannot be {following!r}; "
                f"good values: {', '.join(argument.choices)}"
            )
        yield flag


def plain_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process of SGLang, a server or who drives one, from those of this process.

    Args:
        variables: to start from; see :func:`command` for what is taken out.
    """
    left_out = ("SGLANG_", "CGLAB_", "PYTHON", "TRITON_INTERPRET")
    # The path stays: SGLang itself may be found through it.
    kept = {
        name: value
        for name, value in variables.items()
        if name == "PYTHONPATH" or not name.startswith(left_out)
    }
    # The log ends where the server does, no file of the working folder passes for a module, loopback has no proxy.
    return {
        **kept, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "NO_PROXY": f"{LOOPBACK},localhost",
        "no_proxy": f"{LOOPBACK},localhost",
    }  # fmt: skip

"""Finds the folder of what a user calls a model: a shipped one, a local folder, or a hub download."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cglab.errors import ModelError, nearest
from cglab.models.dsa_config import DSA_PRESETS
from cglab.models.presets import PRESETS
from cglab.settings import user_path

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def data_folder() -> Path:
    """The project's data: ``CGLAB_DATA``, or ``data`` beside the package, as in a checkout."""
    chosen = os.environ.get("CGLAB_DATA")
    return Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "data"


def shipped_models() -> dict[str, Path]:
    """The models that come with the project, by name."""
    folders = sorted(path.parent for path in (data_folder() / "models").glob("*/config.json"))
    return {folder.name: folder for folder in folders}


def shipped_drafts() -> dict[str, Path]:
    """The draft models that come with the project, by name; none of them runs without its target."""
    folders = sorted(path.parent for path in (data_folder() / "drafts").glob("*/config.json"))
    return {folder.name: folder for folder in folders}


def find_folder(name: str | Path) -> Path:
    """Finds a model's folder, downloading it if the name is a hub id and no local folder.

    Args:
        name: a shipped model's name, a folder, or a hub id such as ``Qwen/Qwen3-0.6B``.

    Returns:
        The folder.

    Raises:
        ModelError: if there is no such model, or the download fails.
    """
    text = str(name)
    shipped = shipped_models()
    if text in shipped:
        return shipped[text]
    folder = user_path(name)
    if text and folder.is_dir():  # an empty name would be the folder that this runs in
        return folder
    if isinstance(name, str) and HUB_NAME.fullmatch(text):
        return _download(text)
    models = ", ".join(shipped) or f"none in {data_folder()}; CGLAB_DATA says where the data is"
    presets = (*PRESETS, *DSA_PRESETS)
    raise ModelError(
        f"no model {text!r}{nearest(text, (*shipped, *presets))}: it is no shipped model ({models}), "
        f"no preset with random weights ({', '.join(presets)}), no local folder and no hub id (owner/name); "
        "give one of these"
    )


def _download(name: str) -> Path:
    """Fetches configuration, tokenizer and safetensors of a hub model: no code and no pickles."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{name!r} is no local folder, and a hub id needs the huggingface_hub package; "
            "install it or give a folder"
        ) from error
    try:
        folder = snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"])
    except Exception as error:  # of the hub, its HTTP client or the system: there is no such folder here
        fact = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{name!r} is no local folder and could not be fetched from the hub ({fact}); "
            "check the name and the network, or give the folder of a model that is here"
        ) from error
    return Path(folder)

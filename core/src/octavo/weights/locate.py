"""Where a model is: a folder, a .gguf file, the hub, the packaged demo model. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ConfigError, ModelNotFoundError
from octavo.weights.demo import demo_model
from octavo.weights.gguf_header import PART

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
INDEX = "model.safetensors.index.json"


def locate(model: str | Path, *, revision: str | None = None, load_format: str = "auto", code: bool = False) -> Path:
    """The folder of a safetensors model, or the .gguf file (the first part of a split one).

    model: as `open_model` takes it. code: fetch Python files from the hub too.
    Raises ModelNotFoundError saying what was tried, ConfigError for a load_format that does not fit.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {load_format!r}")
    if str(model) == "":
        path = demo_model()
    else:
        path = Path(model).expanduser()
        if not path.exists():
            from octavo.weights import hub  # only now: most models are on disk, and the client takes long to import

            path = hub.download(str(model), revision=revision, code=code)
    return _gguf_file(path, load_format) or path


def model_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder that hold the model: not adapters, not a second copy in another naming."""
    return sorted(
        file
        for file in folder.glob("*.safetensors")
        if not file.name.startswith(("consolidated", "adapter_")) and file.is_file()
    )


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file to read (the first part of a split one); None if `path` is a folder of safetensors."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is not a .gguf file; name the model's folder instead")
        if load_format == "safetensors":
            raise ConfigError(f"load_format=safetensors does not fit the GGUF file {path}")
        return path
    has_safetensors = bool(model_files(path)) or (path / INDEX).exists()
    if load_format == "safetensors" or (load_format == "auto" and has_safetensors):
        return None
    if load_format == "dummy" and (path / "config.json").exists():
        return None
    files = [file for file in sorted(path.glob("*.gguf")) if _first_part(file)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{path} holds several GGUF files, name one of them: {names}")
    if not files and load_format == "gguf":
        raise ModelNotFoundError(f"{path} holds no .gguf file")
    return files[0] if files else None


def _first_part(file: Path) -> bool:
    part = PART.fullmatch(file.name)
    return part is None or int(part["number"]) == 1

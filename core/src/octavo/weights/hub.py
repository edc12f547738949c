"""Fetch a model from the Hugging Face hub (or its local cache), only the files that are needed."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from octavo.errors import ModelNotFoundError

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
CODE = ["*.py"]
SECOND_COPIES = ["original/*", "consolidated*", "onnx/*", "adapter_*"]


def download(model: str, *, revision: str | None = None, code: bool = False) -> Path:
    """The local folder of repository `owner/name`; for `owner/name:Q4_K_M` its GGUF file of that quantization.

    code: fetch Python files too. Raises ModelNotFoundError saying what was tried and what went wrong.
    """
    repository, _, quantization = model.partition(":")
    wanted = [f"*{quantization}*.gguf"] if quantization else FILES + (CODE if code else [])
    tried = f"no file or folder {Path(model).absolute()}, and no Hugging Face repository {repository!r}"
    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=wanted, ignore_patterns=SECOND_COPIES)
    except HFValidationError as error:
        raise ModelNotFoundError(f"{tried}: {error}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelNotFoundError(f"{tried} in the local cache, and the hub is offline: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(f"{tried} could be fetched: {error}") from error
    if not quantization:
        return Path(folder)
    files = sorted(Path(folder).rglob("*.gguf"))
    matching = [file for file in files if quantization.lower() in file.name.lower()]
    if not matching:
        raise ModelNotFoundError(f"repository {repository!r} has no GGUF file with {quantization!r} in its name")
    return matching[0]

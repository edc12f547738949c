from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.models
from octavo.errors import UnsupportedModelError
from octavo.extensions import load_extensions, resolve
from octavo.models import mistral
from octavo.models.registry import MODELS

MODELS_FOLDER = Path(octavo.models.__file__).parent
GUIDE = MODELS_FOLDER.parents[3] / "docs" / "adding-a-model.md"


def test_native_models_enter_through_the_extension_hook():
    registered = load_extensions().models
    assert MODELS.items() <= registered.items()


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_a_model_lives_in_the_file_of_its_model_type(model_type):
    cls = resolve(MODELS[model_type])
    assert cls.__module__ == f"octavo.models.{model_type.removesuffix('_text')}"
    assert f'"{model_type}"' in Path(sys.modules[cls.__module__].__file__).read_text().splitlines()[0]


def test_the_registry_imports_no_torch():
    code = "import sys, octavo.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_guide_shows_a_whole_model_file_as_it_is():
    shown = re.search(r"```python\n# models/mistral.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] == Path(mistral.__file__).read_text()


def test_a_bidirectional_gemma3_is_refused(tiny_folder, paged):
    folder = tiny_folder("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        paged(folder)

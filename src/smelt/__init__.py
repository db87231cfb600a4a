"""Smelt: a trained model, some data and a budget in; a smaller, faster, verified model out."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from smelt.version import __version__

if TYPE_CHECKING:
    from smelt.compression.recipe.plan import plan
    from smelt.compression.recipe.recipe import Recipe
    from smelt.compression.recipe.run import compress
    from smelt.measure.evaluate import evaluate
    from smelt.measure.paired import compare
    from smelt.measure.robustness.measure import measure_robustness
    from smelt.models.load import load
    from smelt.models.model import Model
    from smelt.serve.engine.async_engine import AsyncEngine
    from smelt.serve.engine.engine import Engine
    from smelt.serve.engine.sampling_params import SamplingParams

__all__ = [
    "AsyncEngine",
    "Engine",
    "Model",
    "Recipe",
    "SamplingParams",
    "__version__",
    "compare",
    "compress",
    "evaluate",
    "load",
    "measure_robustness",
    "plan",
]

_MODULE_OF = {
    "AsyncEngine": "smelt.serve.engine.async_engine",
    "Engine": "smelt.serve.engine.engine",
    "Model": "smelt.models.model",
    "Recipe": "smelt.compression.recipe.recipe",
    "SamplingParams": "smelt.serve.engine.sampling_params",
    "compare": "smelt.measure.paired",
    "compress": "smelt.compression.recipe.run",
    "evaluate": "smelt.measure.evaluate",
    "load": "smelt.models.load",
    "measure_robustness": "smelt.measure.robustness.measure",
    "plan": "smelt.compression.recipe.plan",
}

_RENAMED = {"LiveEngine": "AsyncEngine", "Sampling": "SamplingParams"}  # accepted for one version


if not TYPE_CHECKING:  # a type checker should see the names above and no others

    def __getattr__(name: str) -> Any:
        """Import a public name on first access, so that `import smelt` alone does not import torch."""
        if name in _RENAMED:
            warnings.warn(f"smelt.{name} is now smelt.{_RENAMED[name]}.", FutureWarning, stacklevel=2)
            name = _RENAMED[name]
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'smelt' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Smelt: a trained model, some data and a budget in; a smaller, faster model out, proven and reloadable."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smelt.version import __version__

if TYPE_CHECKING:
    from smelt.compression.recipe.plan import plan
    from smelt.compression.recipe.recipe import Recipe
    from smelt.compression.recipe.run import compress
    from smelt.measure.evaluate import evaluate
    from smelt.measure.paired import compare
    from smelt.models.load import load
    from smelt.models.model import Model
    from smelt.serve.engine.async_engine import LiveEngine
    from smelt.serve.engine.engine import Engine
    from smelt.serve.engine.sampling import Sampling

__all__ = [
    "Engine",
    "LiveEngine",
    "Model",
    "Recipe",
    "Sampling",
    "__version__",
    "compare",
    "compress",
    "evaluate",
    "load",
    "plan",
]

_HOMES = {
    "Engine": "smelt.serve.engine.engine",
    "LiveEngine": "smelt.serve.engine.async_engine",
    "Model": "smelt.models.model",
    "Recipe": "smelt.compression.recipe.recipe",
    "Sampling": "smelt.serve.engine.sampling",
    "compare": "smelt.measure.paired",
    "compress": "smelt.compression.recipe.run",
    "evaluate": "smelt.measure.evaluate",
    "load": "smelt.models.load",
    "plan": "smelt.compression.recipe.plan",
}


if not TYPE_CHECKING:  # a type checker should see the names above and no others

    def __getattr__(name: str) -> Any:
        """A public name from the file it lives in, when it is first asked for: `import smelt` alone loads no torch."""
        if name not in _HOMES:
            raise AttributeError(f"module 'smelt' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

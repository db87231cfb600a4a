"""Smelt: a trained model, some data and a budget in; a smaller, faster model out, proven and reloadable."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smelt.measure.evaluate import evaluate
    from smelt.measure.paired import compare
    from smelt.models.load import load
    from smelt.models.model import Model
    from smelt.recipes.plan import plan
    from smelt.recipes.recipe import Recipe
    from smelt.recipes.run import compress
    from smelt.serve.engine.engine import Engine
    from smelt.serve.engine.live import LiveEngine
    from smelt.serve.engine.sampling import Sampling

__version__ = "0.1.0"
__all__ = ["Engine", "LiveEngine", "Model", "Recipe", "Sampling", "compare", "compress", "evaluate", "load", "plan"]

_HOMES = {
    "Engine": "smelt.serve.engine.engine",
    "LiveEngine": "smelt.serve.engine.live",
    "Model": "smelt.models.model",
    "Recipe": "smelt.recipes.recipe",
    "Sampling": "smelt.serve.engine.sampling",
    "compare": "smelt.measure.paired",
    "compress": "smelt.recipes.run",
    "evaluate": "smelt.measure.evaluate",
    "load": "smelt.models.load",
    "plan": "smelt.recipes.plan",
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

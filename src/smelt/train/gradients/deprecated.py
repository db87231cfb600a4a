"""Old names of parameters, which work for one version with a warning."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from smelt.config import warn_renamed

P = ParamSpec("P")
R = TypeVar("R")


def renamed_parameter(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to accept a parameter under its old name too."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                warn_renamed(old, new, function.__qualname__)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate

"""Errors that users can cause: one sentence with the cause and the way out, shown without a traceback."""

DISTRIBUTION = "smeltml"  # on PyPI, where `smelt` belongs to others


class SmeltError(Exception):
    """An error that a user can cause and fix. The command line prints its message and exits with 2."""

    exit_code = 2


class ModelError(SmeltError):
    """The model cannot be found or read, or its architecture is not supported."""


class DataError(SmeltError):
    """The data cannot be found or read, or lacks what was requested."""


class ConfigError(SmeltError):
    """An option or configuration key is unknown, invalid, or conflicts with another one."""


class RecipeError(ConfigError):
    """A compression recipe has an unknown key or an invalid value."""


class BudgetError(SmeltError):
    """The recipe cannot meet the budget with what it may remove."""


class DivergenceError(DataError):
    """A loss or gradient of training is not finite; the weights before that step are kept."""


class QualityGateError(SmeltError):
    """The result of a run is worse than its margin allows, or there are too few items to tell."""

    exit_code = 3


class ResourceError(SmeltError):
    """There is not enough memory or disk space."""


class FormatError(SmeltError):
    """A number format does not exist or cannot represent the requested values."""


class ConversionError(SmeltError):
    """A network has no integer form: an operator lacks one, or a scale would overflow an integer."""


class RequestError(SmeltError):
    """A request cannot be served: a value is out of range, the prompt is too long, or the queue is full."""


def install_command(extra: str = "") -> str:
    """Return the command that installs Smelt, with one of its extras: the name on PyPI is not that of the package."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a Rust library such as tokenizers, which is no `Exception`."""
    return type(error).__name__ == "PanicException"

"""Errors that users can cause: one sentence with the cause and the way out, shown without a traceback."""


class SmeltError(Exception):
    """An error that a user can cause and fix. The command line prints its message and exits with 2."""


class ModelError(SmeltError):
    """The model cannot be found, read, or is of a kind Smelt does not know."""


class DataError(SmeltError):
    """The data cannot be found, read, or does not hold what was asked of it."""


class ConfigError(SmeltError):
    """An option or a configuration key is unknown, has an impossible value, or does not go with another one."""


class RecipeError(ConfigError):
    """A compression recipe has an unknown key or an impossible value."""


class BudgetError(SmeltError):
    """The budget cannot be met by what the recipe may remove."""


class ResourceError(SmeltError):
    """The work does not fit: memory or disk."""


class FormatError(SmeltError):
    """A number format that does not exist, or that cannot hold what is asked of it."""


class RequestError(SmeltError):
    """A request that cannot be served as it is: a value out of range, a prompt that is too long, a full queue."""

"""Load the tasks of lm-eval offline, without running code from task files.

A task file is YAML. It can name Python functions (`!function`), metrics that are Python files, and templates; lm-eval
runs all of these. Here a folder of task files may hold plain data only unless the caller allows its code: functions and
foreign metrics are refused, and templates are rendered in Jinja's sandbox. The tasks that come with lm-eval are part of
that package and may use its functions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from smelt.errors import ConfigError, DataError, install_command
from smelt.models.json_file import one_line
from smelt.strict_yaml import read_yaml

FILE_FORMATS = ("arrow", "csv", "json", "parquet", "text")  # of `datasets`, read from local files
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")
_CODE_HINT = "add --allow-task-code if you trust the folder"


def check_installed() -> None:
    """Raise if lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"lm-eval is not installed: {install_command('harness')}.") from error


@contextmanager
def isolated(allow_code: bool = False) -> Iterator[None]:
    """Keep lm-eval offline and quiet; unless code is allowed, sandbox templates and refuse metrics that are files."""
    with ExitStack() as stack:
        # The flags are read when the packages are imported, so both the variables and the read values are set.
        for name in _OFFLINE:
            _set(stack, os.environ, name, "1")
        import datasets.config
        import evaluate
        import huggingface_hub.constants
        import lm_eval.utils
        from jinja2.sandbox import SandboxedEnvironment

        logger = logging.getLogger("lm_eval")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        _set(stack, vars(huggingface_hub.constants), "HF_HUB_OFFLINE", True)
        _set(stack, vars(datasets.config), "HF_HUB_OFFLINE", True)
        _set(stack, vars(evaluate.config), "HF_EVALUATE_OFFLINE", True)
        if not allow_code:
            plain = lm_eval.utils.env
            sandbox = SandboxedEnvironment(
                loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
            )
            sandbox.filters.update(plain.filters)
            _set(stack, vars(lm_eval.utils), "env", sandbox)
            _set(stack, vars(evaluate), "load", _refuse_metric_file)
        yield


def _set(stack: ExitStack, names: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Set a variable until the stack is left."""
    if name in names:
        stack.callback(names.__setitem__, name, names[name])
    else:
        stack.callback(names.pop, name, None)
    names[name] = value


def _refuse_metric_file(name: str, *_: Any, **__: Any) -> None:
    """Replace `evaluate.load`, which would run a Python file of this name in the working directory."""
    raise ConfigError(f"the metric {name!r} is not one of lm-eval's own; it would be run from a Python file.")


def load_tasks(names: list[str], folder: Path | None, allow_code: bool = False) -> dict[str, Any]:
    """Load tasks by name from a folder of task files and from lm-eval itself; the folder's come first.

    Returns lm-eval's dictionary of `tasks` and `groups`. Call inside `isolated`.
    """
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    if folder is not None:
        check_task_folder(folder, allow_code)
    paths = {} if folder is None else {"include_path": str(folder)}
    manager = TaskManager(**paths, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(**paths)  # reads the thousands of files of lm-eval
    missing = [name for name in names if name not in set(manager.all_tasks)]
    if missing:
        where = "" if folder is None else f" in {folder} or"
        raise ConfigError(f"there is no task '{missing[0]}'{where} in lm-eval: check --tasks and --tasks-path.")
    try:
        loaded: dict[str, Any] = dict(manager.load(names))
    except (ConfigError, MemoryError):
        raise
    except TemplateError as error:
        raise template_error(error) from error
    except Exception as error:  # lm-eval, `datasets` and the functions of a task raise anything
        raise DataError(
            f"the tasks {', '.join(names)} cannot be loaded offline ({one_line(error)}): give local task files with "
            "--tasks-path, or download the data sets into the cache of `datasets` first."
        ) from error
    for name, task in loaded["tasks"].items():
        _check_task(name, task)
    return loaded


def template_error(error: Exception) -> ConfigError:
    """Return the error of a template that is wrong, or that the sandbox refuses."""
    return ConfigError(f"a template of the tasks cannot be rendered ({one_line(error)}): correct the task file.")


def _check_task(name: str, task: Any) -> None:
    """Refuse what lm-eval would discover only after the model has run."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"the task '{name}' runs code that the model writes, which Smelt never does: leave it out.")
    if task.config.process_results is None:
        unknown = [metric for metric, function in getattr(task, "_metric_fn_list", {}).items() if function is None]
        if unknown:
            raise ConfigError(f"the metric {unknown[0]!r} of the task '{name}' is not one of lm-eval's own.")


def check_task_folder(folder: Path, allow_code: bool = False) -> None:
    """Raise if a task file of the folder, or a file it includes, could run code or read remote data."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder of task files at {folder}: check --tasks-path.")
    files = sorted(folder.rglob("*.yaml"))
    if not files:
        raise ConfigError(f"{folder} has no task files (*.yaml): check --tasks-path.")
    if allow_code:
        return
    seen: set[Path] = set()
    while files:
        path = files.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        content = _plain_content(path)
        for mapping in _mappings(content):
            _check_mapping(mapping, path)
        includes = content.get("include", []) if isinstance(content, dict) else []
        files += [path.parent / str(name) for name in (includes if isinstance(includes, list) else [includes])]


def _plain_content(path: Path) -> Any:
    """Read a task file that has no tags, which is how YAML names functions."""
    try:
        with path.open("rb") as file:
            tags = [getattr(event, "tag", None) for event in yaml.parse(file, yaml.SafeLoader)]
    except (OSError, yaml.YAMLError, ValueError):
        tags = []  # the reader below explains
    code = next((tag for tag in tags if tag and not tag.startswith("tag:yaml.org,2002:")), None)
    if code is not None:
        raise ConfigError(f"{path} runs Python code ({code}): {_CODE_HINT}.")
    return read_yaml(path, "task file")


def _mappings(content: Any) -> Iterator[dict[Any, Any]]:
    """Yield every mapping inside of plain data."""
    if isinstance(content, dict):
        yield content
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _mappings(value)


def _check_mapping(mapping: dict[Any, Any], path: Path) -> None:
    import lm_eval.api.metrics  # noqa: F401  (registers the metrics)
    from lm_eval.api.registry import metric_registry

    metric, source = mapping.get("metric"), mapping.get("dataset_path")
    if "metric" in mapping and (mapping.get("hf_evaluate") or metric not in metric_registry):
        raise ConfigError(f"{path} has the metric {metric!r}, which would be run from a Python file: {_CODE_HINT}.")
    if source is not None and source not in FILE_FORMATS and (not isinstance(source, str) or Path(source).exists()):
        raise ConfigError(
            f"{path} has the dataset_path {source!r}: expected {', '.join(FILE_FORMATS)} with `data_files`, or the hub "
            "id of a data set that is in the cache."
        )
    remote = [text for text in _strings(mapping.get("dataset_kwargs")) if "://" in text or "::" in text]
    if remote:
        raise ConfigError(f"{path} reads {remote[0]!r} from the network: download it and name the local file.")


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _strings(value)

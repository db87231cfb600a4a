"""Registries of interchangeable classes: methods, scorers, budgets, compressors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from smelt.config import object_schema, parse, suggest
from smelt.errors import ConfigError

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Mapping[str, type[T]], Generic[T]):
    """Map names to frozen dataclasses of one kind, and build them from plain settings.

        METHODS: Registry[Method] = Registry("method")

        @METHODS.register("gptq", paper="...")  # sets the class attributes name, paper and summary
        @dataclass(frozen=True)
        class GPTQ(Method):
            \"\"\"The first line becomes `summary`.\"\"\"

            bits: int = 4

        METHODS.build({"method": "gptq", "bits": 3})
        METHODS.build("gptq", bits=3)  # the same

    Unknown names and parameters (with the nearest one suggested), missing parameters and values of the wrong type are
    errors of one sentence. `noun` names the kind in errors, `key` is where a mapping holds the name.
    """

    def __init__(self, noun: str, *, key: str | None = None, error: type[ConfigError] = ConfigError) -> None:
        self.noun, self.key, self.error = noun, key or noun, error
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str, **class_attributes: Any) -> Callable[[C], C]:
        """Add the decorated class under a name; class attributes are set on it."""

        def add(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"the {self.noun} {name} is registered twice")
            summary = (cls.__doc__ or "").strip().partition("\n")[0]
            for attribute, value in {"name": name, "summary": summary, **class_attributes}.items():
                setattr(cls, attribute, value)
            self._classes[name] = cls
            return cls

        return add

    def build(self, settings: Mapping[str, Any] | str, /, **parameters: Any) -> T:
        """Build from a mapping that holds the name under `key`, or from a name and parameters."""
        if isinstance(settings, str):
            settings = {self.key: settings}
        parameters = {**settings, **parameters}
        name = parameters.pop(self.key, None)
        return parse(self.named(name), parameters, f"the {self.noun} {name}", noun="parameter", error=self.error)

    def named(self, name: Any) -> type[T]:
        """Return the class of a name."""
        if not isinstance(name, str) or name not in self._classes:
            names = sorted(self._classes)
            raise self.error(f"there is no {self.noun} {name!r:.80}{suggest(name, names, 'there are')}")
        return self._classes[name]

    def json_schema(self) -> dict[str, Any]:
        """Describe the mappings that `build` accepts: one alternative per class."""
        return {"oneOf": [self._class_schema(name) for name in sorted(self._classes)]}

    def _class_schema(self, name: str) -> dict[str, Any]:
        schema = object_schema(self._classes[name])
        schema["properties"] = {self.key: {"const": name}, **schema["properties"]}
        schema["required"] = [self.key, *schema["required"]]
        return schema

    def __getitem__(self, name: str) -> type[T]:
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


class Registered:
    """Base of frozen dataclasses that a registry builds where a configuration has `{quantizer: sawb, bits: 2}`."""

    name: ClassVar[str]

    @classmethod
    def registry(cls) -> Registry[Any]:
        raise NotImplementedError

    @classmethod
    def from_config(cls, value: Any) -> Any:
        registry = cls.registry()
        if not isinstance(value, Mapping):
            example = f"{{{registry.key}: {next(iter(registry))}}}"
            raise registry.error(f"a {registry.noun} must be a mapping such as {example}, not {value!r:.80}.")
        return registry.build(value)

    @classmethod
    def config_class(cls, settings: Mapping[str, Any]) -> type[Any] | None:
        """Return the class that a mapping names."""
        registry = cls.registry()
        return registry.get(str(settings.get(registry.key)))

    @classmethod
    def config_schema(cls) -> dict[str, Any]:
        return cls.registry().json_schema()

    def to_json(self) -> dict[str, Any]:
        """Return the mapping that `from_config` reads."""
        return {self.registry().key: self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]

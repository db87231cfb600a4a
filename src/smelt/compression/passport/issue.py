"""Issue the passport of an artifact at the end of a run, and sign folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.compression.base import Choices
from smelt.compression.passport.check import changed_files
from smelt.compression.passport.document import PASSPORT, FileFacts, Passport, read_passport
from smelt.compression.passport.origin import describe_data, describe_run, describe_source
from smelt.compression.passport.signing import SIGNATURE, load_private_key, sign
from smelt.compression.recipe.recipe import Recipe
from smelt.data import PromptData
from smelt.errors import ModelError, RecipeError
from smelt.files import write_atomically
from smelt.fingerprint import hash_files, list_files
from smelt.measure.evaluate import Data
from smelt.models.artifact import write_json
from smelt.models.model import Model
from smelt.models.verify import describe_probe
from smelt.progress import Progress

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec


class PassportBuilder:
    """Collects during a run what the passport will say, and hands out the choices of the run to repeat, if any."""

    def __init__(
        self, source: str, recipe: Mapping[str, Any], device: str, offload: bool, sign_key: Path | None,
        recorded: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._source, self._recipe, self._device, self._offload = source, recipe, device, offload
        self._key = None if sign_key is None else load_private_key(sign_key)
        self._recorded = recorded
        self.source_hashes: dict[str, str] = {}
        self._data: dict[str, Any] = {}
        self._passport: Passport
        self.batch_size: int | None = None

    def add_data(self, calibration: Data | PromptData | None, evaluation: Data | None) -> None:
        self._data = {"calibration": describe_data(calibration), "evaluation": describe_data(evaluation)}

    def recorded_batch_size(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the batch size that was chosen for `auto` in the run to repeat."""
        batch_size = self._recorded.get("batch_size")
        if recipe.data.batch_size is not None or batch_size is None:
            return recipe
        if type(batch_size) is not int:
            raise RecipeError("the recorded batch size must be an integer.")
        return replace(recipe, data=replace(recipe.data, batch_size=batch_size))

    def recorded_choices(self, step: str) -> Choices:
        """Return the choices of one step, by its name: `step-0` for the first."""
        steps = self._recorded.get("steps", {})
        choices = steps.get(step, {}) if isinstance(steps, dict) else None
        if not isinstance(choices, dict):
            raise RecipeError("the recorded choices must be given for each step.")
        return Choices(choices)

    def prepare(
        self, folder: Path, model: Model, steps: list[dict[str, Any]], measurements: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Describe the files written so far and return the summary for the report, which still follows."""
        self._passport = Passport(
            files=_describe_files(folder, {}),
            source=describe_source(self._source, self.source_hashes),
            recipe=dict(self._recipe),
            seeds={"recipe": self._recipe["seed"]},
            data=self._data,
            choices={
                "batch_size": self.batch_size,
                "steps": {f"step-{position}": step.pop("choices", {}) for position, step in enumerate(steps)},
            },
            probe=describe_probe(model),
            measurements=dict(measurements),
            run=describe_run(self._device, self._offload, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        )
        return passport_summary(self._passport)

    def write(self, folder: Path, name: str) -> None:
        """Write the passport with the files that followed, and the signature of the folder if there is a key."""
        passport = replace(self._passport, files=_describe_files(folder, self._passport.files))
        write_json(folder / PASSPORT, passport.to_json())
        if self._key is not None:
            hashes = {**passport.hashes, **hash_files({PASSPORT: folder / PASSPORT})}
            (folder / SIGNATURE).write_text(sign(name, hashes, self._key), encoding="utf-8")


def sign_folder(folder: Path, key: ec.EllipticCurvePrivateKey, progress: Progress) -> int:
    """Sign every file of a folder, after checking it against its passport if it has one; return the number of files."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give the folder of an artifact.")
    files = {name: path for name, path in list_files(folder).items() if name != SIGNATURE}
    if not files:
        raise ModelError(f"{folder} is empty; there is nothing to sign.")
    passport = read_passport(folder) if PASSPORT in files else None
    hashes = hash_files(files, progress=progress)
    if passport is not None:
        changed = changed_files(passport.hashes, {name: hashes[name] for name in hashes if name != PASSPORT})
        if not changed.none:
            raise ModelError(f"{folder} is not signed, because it differs from its passport: {changed.describe()}.")
    bundle = sign(folder.resolve().name, hashes, key)
    write_atomically(folder / SIGNATURE, lambda file: file.write_text(bundle, encoding="utf-8"))
    return len(hashes)


def passport_summary(passport: Passport) -> dict[str, Any]:
    """Return what the report shows."""
    return {
        "fingerprint": passport.fingerprint,
        "files": {name: {"bytes": facts.bytes, "sha256": facts.sha256} for name, facts in passport.files.items()},
        "source": {name: passport.source[name] for name in ("name", "sha256", "license")},
        "data": dict(passport.data),
    }


def _describe_files(folder: Path, known: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    """Describe the files of a folder; known ones are not read again."""
    files = list_files(folder)
    hashes = hash_files({name: path for name, path in files.items() if name not in known})
    return {
        name: known[name] if name in known else FileFacts(path.stat().st_size, hashes[name])
        for name, path in files.items()
    }

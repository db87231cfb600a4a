"""Sign a folder and check its signature, as an OpenSSF model signing bundle with an elliptic curve key.

The bundle is a Sigstore bundle (JSON): a DSSE envelope around an in-toto statement that lists the sha256 of every file.
The reference implementation, the package `model-signing`, reads what this module writes and the reverse; it is not used
here because it brings 20 packages, among them network clients, and reads the whole folder a second time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from smelt.errors import ConfigError, ModelError, install_command
from smelt.models.json_file import parse_object, read_object

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

SIGNATURE = "model.sig"

_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAX_KEY_BYTES = 2**16


class SignatureError(ModelError):
    """The signature is damaged, or is not that of the given key."""


def load_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read an elliptic curve private key from a PEM file."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read_key(path), password=None)
    except TypeError as error:
        raise ConfigError(f"the key {path} is encrypted; give a decrypted one.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a private key in PEM format.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise ConfigError(f"the key {path} is not of the curve P-256, P-384 or P-521, which model signing requires.")
    return key


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read an elliptic curve public key from a PEM file."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read_key(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a public key in PEM format.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise ConfigError(f"the key {path} is not of the curve P-256, P-384 or P-521, which model signing requires.")
    return key


def sign(name: str, hashes: Mapping[str, str], key: ec.EllipticCurvePrivateKey) -> str:
    """Return the signature bundle (JSON) of a model: its name, and the sha256 of each file by relative path."""
    from cryptography.hazmat.primitives.asymmetric import ec

    payload = json.dumps(_statement(name, hashes), indent=1).encode("ascii")
    signature = key.sign(_pre_authentication_encoding(payload), ec.ECDSA(_hash_for(key.public_key())))
    bundle = {
        "mediaType": _BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key_hint(key.public_key())}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode("ascii"),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode("ascii"), "keyid": ""}],
        },
    }
    return json.dumps(bundle, indent=1) + "\n"


def signed_hashes(path: Path, key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    """Return the hashes that a signature bundle lists, after checking that this key signed them."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        payload, signature = _envelope(read_object(path))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise SignatureError(f"{path} is not a signature bundle of a model.") from error
    try:
        key.verify(signature, _pre_authentication_encoding(payload), ec.ECDSA(_hash_for(key)))
    except InvalidSignature:
        raise SignatureError(f"{path} was not signed with the given key.") from None
    try:
        return _listed_hashes(parse_object(payload, f"the statement in {path}"))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise SignatureError(f"{path} was signed with the given key but lists no files in a known form.") from error


def key_hint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the sha256 of a public key in PEM format, by which a bundle names its key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _statement(name: str, hashes: Mapping[str, str]) -> dict[str, Any]:
    resources = [
        {"name": file, "algorithm": "sha256", "digest": hashes[file]} for file in sorted(hashes, key=PurePosixPath)
    ]
    return {
        "_type": _STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": _root_digest([entry["digest"] for entry in resources])}}],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [SIGNATURE],
            },
            "resources": resources,
        },
    }


def _root_digest(digests: list[str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def _envelope(bundle: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return payload and signature of a bundle."""
    envelope = bundle["dsseEnvelope"]
    if bundle["mediaType"] != _BUNDLE_TYPE or envelope["payloadType"] != _PAYLOAD_TYPE:
        raise ValueError("another type of bundle")
    (signature,) = envelope["signatures"]
    try:
        return base64.b64decode(envelope["payload"], validate=True), base64.b64decode(signature["sig"], validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def _listed_hashes(statement: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of a statement after checking its type and its digest over all of them."""
    if statement["_type"] != _STATEMENT_TYPE or statement["predicateType"] != _PREDICATE_TYPE:
        raise ValueError("another type of statement")
    (subject,) = statement["subject"]
    predicate = statement["predicate"]
    serialization = predicate["serialization"]
    if serialization["method"] != "files" or serialization["hash_type"] != "sha256":
        raise ValueError("another way of hashing")
    if any(resource["algorithm"] != "sha256" for resource in predicate["resources"]):
        raise ValueError("another hash")
    hashes = {resource["name"]: resource["digest"] for resource in predicate["resources"]}
    if len(hashes) != len(predicate["resources"]) or _root_digest(list(hashes.values())) != subject["digest"]["sha256"]:
        raise ValueError("the digest over all files differs")
    return hashes


def _pre_authentication_encoding(payload: bytes) -> bytes:
    """Return the bytes that DSSE signs: the payload with its type and their lengths."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode("ascii"), len(payload), payload)


def _hash_for(key: ec.EllipticCurvePublicKey) -> HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    by_size: dict[int, HashAlgorithm] = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    return by_size[key.curve.key_size]


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}.") from error


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"signatures need one more package: {install_command('signing')}.") from error

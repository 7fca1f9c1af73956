"""Files that are there whole or not at all, and one line about each that cannot be used.

Everything the library writes goes through `write_chunks`, everything it reads back through the
readers here: what the system refuses, and what is cut short, damaged, of another schema or of
another format version is an `ArtifactError` that names the file and what to do. This module knows
no run folders and none of the contents.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from entmtp_calib.errors import ArtifactError
from entmtp_calib.provenance import sha256_file
from entmtp_calib.records import FORMAT_VERSION, strict_json

if TYPE_CHECKING:
    import pyarrow as pa

TEMPORARY = ".writing"

_FREE_SPACE = "free some space and run the same command again"
_OTHER_FOLDER = "choose a folder that you may write to"
_IN_THE_WAY = "choose another folder; a file is in the way"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EACCES: _OTHER_FOLDER,
    errno.EPERM: _OTHER_FOLDER,
    errno.EROFS: _OTHER_FOLDER,
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.ENAMETOOLONG: "choose a shorter name",
}
_MAKE_AGAIN = "delete it and run the command that wrote it again"
_SAFETENSORS_PREFIX = 8  # bytes that say how long the JSON header is
_LFS_POINTER = b"version https://git-lfs"


def write_bytes(path: Path, data: bytes) -> None:
    """`write_chunks` for what is in memory already."""
    write_chunks(path, [data])


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file so that it is there whole or not at all, whatever happens meanwhile.

    Args:
        chunks: the content, a part at a time; what they raise leaves no file.

    Raises:
        ArtifactError: no space, no permission, or another reason the system gives.
    """
    temporary = path.with_name(f"{TEMPORARY}-{os.getpid()}-{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    del chunk  # or it would stay while the next one is made
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    """Read a file; one that is missing, unreadable or only a Git LFS pointer is refused."""
    with _reading(path):
        data = path.read_bytes()
    if data.startswith(_LFS_POINTER):
        raise ArtifactError(f"{path} is a Git LFS pointer", "the file itself", "run git lfs pull")
    return data


def hash_file(path: Path) -> str:
    """The SHA-256 of a file."""
    with _reading(path):
        return sha256_file(path)


def write_json(path: Path, value: Any) -> None:
    """Write strict, indented JSON, whole or not at all."""
    write_bytes(path, (strict_json(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; one that is cut short or is not JSON is an `ArtifactError`."""
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        raise damaged(path, "cut short, or not JSON") from None


def read_versioned(path: Path, keys: Mapping[str, type]) -> dict[str, Any]:
    """Read a JSON object of our format version that has values of these types."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object")
    check_version(path, value.get("format_version"))
    check_keys(path, value, keys)
    return value


def check_keys(path: Path, value: Mapping[str, Any], keys: Mapping[str, type]) -> None:
    """Refuse an object of the file that lacks a key, or has a value of another type there."""
    wrong = [key for key, kind in keys.items() if not isinstance(value.get(key), kind)]
    if wrong:
        raise damaged(path, f"nothing usable under {', '.join(wrong)}")


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet with checksums, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    write_bytes(path, buffer.getvalue().to_pybytes())


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a Parquet file whose columns must be exactly the schema's.

    Raises:
        ArtifactError: naming the file, and the columns that differ or the format version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = read_bytes(path)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _check_schema(path, file.schema_arrow, schema)
        return file.read()
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        raise damaged(path, "cut short, or not Parquet") from None


def read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors and the metadata of a whole safetensors file, with NumPy.

    Raises:
        ArtifactError: naming the file and what is wrong with it.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = read_bytes(path)
    metadata = _safetensors_metadata(path, data)
    try:
        return load(data), metadata
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"not safetensors: {error}") from None


def check_version(path: Path, found: Any) -> None:
    """Refuse another format version than ours."""
    if str(found) != str(FORMAT_VERSION):
        raise ArtifactError(
            f"{path} has format version {'unknown' if found is None else found}",
            f"format version {FORMAT_VERSION}",
            "make it again, or read it with the version of entmtp that made it",
        )


def damaged(path: Path, how: str) -> ArtifactError:
    """The error for a file whose content cannot be used."""
    return ArtifactError(f"{path} is damaged ({how})", action=_MAKE_AGAIN)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The system's reasons not to write, as one line with what to do."""
    try:
        yield
    except OSError as error:
        found = f"cannot write {path}: {error.strerror or error}"
        raise ArtifactError(found, action=_REMEDIES.get(error.errno or 0)) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = f"cannot read {path}: {error.strerror or error}"
        raise ArtifactError(found, action="check the path and its permissions") from error


def _safetensors_metadata(path: Path, data: bytes) -> dict[str, str]:
    """The metadata, after every length that the header claims is checked against the file's."""
    start = _SAFETENSORS_PREFIX + int.from_bytes(data[:_SAFETENSORS_PREFIX], "little")
    if not _SAFETENSORS_PREFIX < start <= len(data):
        raise damaged(path, f"{len(data)} bytes, cut short or not safetensors")
    try:
        header = json.loads(data[_SAFETENSORS_PREFIX:start])
        metadata = dict(header.pop("__metadata__", {}))
        size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError):
        raise damaged(path, "its header is not that of safetensors") from None
    if size != len(data) - start:
        raise damaged(path, f"{len(data) - start} bytes of tensors instead of {size}")
    return metadata


def _check_schema(path: Path, found: pa.Schema, schema: pa.Schema) -> None:
    version = (found.metadata or {}).get(b"format_version")
    check_version(path, version and version.decode())
    if found.equals(schema, check_metadata=False):
        return
    have, want = (
        {field.name: f"{field.type}{'' if field.nullable else ' not null'}" for field in columns}
        for columns in (found, schema)
    )
    unlike = [
        f"{name}: {have.get(name, 'absent')} instead of {want.get(name, 'absent')}"
        for name in {**want, **have}
        if have.get(name) != want.get(name)
    ]
    what = ", ".join(unlike) or "their order"
    raise ArtifactError(f"{path} has other columns ({what})", action=_MAKE_AGAIN)

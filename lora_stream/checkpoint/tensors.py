"""Tensors in files, read one at a time, however many files hold them and in whatever pieces.

    Safetensors    files of a Hugging Face model or a PEFT adapter
    Pickled        pytorch_model*.bin, adapter_model.bin
    RankShards     model_world_size_W_rank_R.pt, one file per rank, as verl writes them
    Distributed    a directory of torch.distributed.checkpoint

Nothing is ever unpickled that torch's weights_only loader does not know. A file that is cut off, a piece that is missing or
belongs to something else raises ValueError with the file's name.
"""

import contextlib
import enum
import io
import logging
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, Protocol

import torch

from lora_stream import shards
from lora_stream.plan import listed

# Of mapped files so much may be resident before they are opened anew, which lets go of the pages. To unpickle takes its time.
OPEN_BYTES = 64 * 1024 * 1024
OPEN_PICKLED_BYTES = 256 * 1024 * 1024


class Info(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensors(Protocol):
    """What files hold, by name."""

    infos: dict[str, Info]
    metadata: dict[str, str]  # of the files themselves

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor; it may lie in a mapped file, which stays open for as long as it lives."""

    def let_go(self) -> None:
        """Files may be opened anew: their pages go with the last tensor that was read of them."""


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (pickle.UnpicklingError, ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"{path}: cannot be read as plain tensors ({_first_line(error)}). What needs more than torch's weights_only loader is refused, "
            "because it could run code; save the state dict alone"
        ) from error
    except FileNotFoundError as error:
        raise ValueError(f"{path}: is missing") from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path}: is damaged or cut off ({_first_line(error)}); copy it again") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class _Files:
    """Tensors in files that are opened as they are needed, and again when enough of them was read."""

    open_bytes = OPEN_BYTES

    def __init__(self, files: dict[str, Path] | Sequence[Path]) -> None:
        """files: all in which there are tensors; with names, which tensor is in which, as an index has it."""
        self._files: dict[str, Path] = {}
        self._opened: dict[Path, object] = {}
        self._num_bytes = 0
        self.infos: dict[str, Info] = {}
        self.metadata: dict[str, str] = {}
        for path in dict.fromkeys(files.values() if isinstance(files, dict) else files):
            for name, info in self._infos_in(path):
                if name in self._files:
                    raise ValueError(f"{path}: holds {name} as {self._files[name]} does")
                self._files[name] = path
                self.infos[name] = info
        if isinstance(files, dict):
            _check_index(files, self._files)

    def _open(self, path: Path) -> Any:
        raise NotImplementedError

    def _infos_in(self, path: Path) -> Iterable[tuple[str, Info]]:
        raise NotImplementedError

    def _get(self, opened: Any, name: str) -> torch.Tensor:
        raise NotImplementedError

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._open(path)
        return self._opened[path]

    def read(self, name: str) -> torch.Tensor:
        path = self._files[name]
        self._num_bytes += self.infos[name].num_bytes
        with _explained(path):
            return self._get(self._file(path), name)

    def let_go(self) -> None:
        if self._num_bytes > self.open_bytes:
            self._opened.clear()
            self._num_bytes = 0


class Safetensors(_Files):
    def _open(self, path: Path) -> Any:
        from safetensors import safe_open

        return safe_open(path, framework="pt")

    def _infos_in(self, path: Path) -> Iterable[tuple[str, Info]]:
        with _explained(path):
            file = self._file(path)
            self.metadata |= file.metadata() or {}
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        # Of a type that is not known here the plan says what it wants instead.
        return [
            (name, Info(_DTYPES.get(part.get_dtype(), torch.uint8), tuple(part.get_shape())))
            for name, part in parts.items()
        ]

    def _get(self, opened: Any, name: str) -> torch.Tensor:
        return opened.get_tensor(name)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _check_index(said: dict[str, Path], found: dict[str, Path]) -> None:
    for name, path in said.items():
        if found.get(name) != path:
            raise ValueError(
                f"{path}: the index says that it holds {name}, but it does not; the files are not of one save"
            )
    if extra := sorted(found.keys() - said.keys()):
        raise ValueError(f"{found[extra[0]]}: holds {listed(extra)}, which the index does not name")


class Pickled(_Files):
    """Dicts of tensors, by torch.save."""

    open_bytes = OPEN_PICKLED_BYTES

    def _open(self, path: Path) -> Any:
        return load_pickled(path)

    def _infos_in(self, path: Path) -> Iterable[tuple[str, Info]]:
        return [(name, Info(tensor.dtype, tuple(tensor.shape))) for name, tensor in self._file(path).items()]

    def _get(self, opened: Any, name: str) -> torch.Tensor:
        return opened[name]


def load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """A dict of tensors, DTensors among them, in the mapped file."""
    shards.know_dtensor()
    # It warns of every mesh that has no process group; none is wanted here.
    meshes = logging.getLogger("torch.distributed.device_mesh")
    level = meshes.level
    meshes.setLevel(logging.ERROR)
    try:
        with _explained(path):
            try:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                found = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    finally:
        meshes.setLevel(level)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, expected a dict of tensors")
    strange = [name for name, value in found.items() if not (isinstance(name, str) and isinstance(value, torch.Tensor))]
    if strange:
        raise ValueError(f"{path}: {strange[0]!r} is no tensor; expected a state dict of the model alone")
    return found


_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class RankShards:
    """A state dict of each rank, in which a tensor is a DTensor, cut along one dimension, or whole."""

    @staticmethod
    def files_in(directory: Path) -> dict[tuple[int, int], Path]:
        """By world size and rank."""
        found = {}
        for path in directory.iterdir():
            if match := _RANK_FILE.fullmatch(path.name):
                found[int(match[1]), int(match[2])] = path
        return found

    def __init__(self, directory: Path, world_size: int | None = None) -> None:
        """world_size: what the directory says elsewhere."""
        files = self.files_in(directory)
        sizes = sorted({size for size, _ in files})
        if len(sizes) != 1:
            raise ValueError(
                f"{directory}: holds shards of runs on {' and '.join(map(str, sizes))} ranks; keep those of one save"
            )
        (size,) = sizes
        if world_size is not None and world_size != size:
            raise ValueError(
                f"{directory}: fsdp_config.json says world_size {world_size}, but the shards are of {size} ranks"
            )
        if missing := [rank for rank in range(size) if (size, rank) not in files]:
            name = f"model_world_size_{size}_rank_{missing[0]}.pt"
            raise ValueError(f"{directory / name}: is missing; {len(files)} of {size} shards are there")
        if foreign := [rank for _, rank in files if rank >= size]:
            raise ValueError(f"{files[size, foreign[0]]}: there is no rank {foreign[0]} of {size}")
        self._paths = [files[size, rank] for rank in range(size)]
        self._loaded: list[dict] = []
        self._num_bytes = 0
        self.metadata: dict[str, str] = {}
        names = [list(part) for part in self._dicts()]
        for path, found in zip(self._paths, names, strict=True):
            if set(found) != set(names[0]):
                odd = sorted(set(found) ^ set(names[0]))
                raise ValueError(
                    f"{path}: {listed(odd)} is in only one of it and {self._paths[0].name}; the shards are not of one save"
                )
        self.infos = {name: self._info(name) for name in names[0]}

    def _dicts(self) -> list[dict]:
        if not self._loaded:
            self._loaded = [load_pickled(path) for path in self._paths]
        return self._loaded

    def _parts(self, name: str) -> list[torch.Tensor]:
        return [part[name] for part in self._dicts()]

    def _info(self, name: str) -> Info:
        parts = self._parts(name)
        what = [(part.dtype, tuple(part.shape), shards.describe(part)) for part in parts]
        for path, found in zip(self._paths, what, strict=True):
            if found != what[0]:
                raise ValueError(
                    f"{path}: {name} is {_words(found)}, in {self._paths[0].name} {_words(what[0])}; the shards are not of one "
                    "save"
                )
        with _explained_piece(self._paths[0].parent, name):
            shards.check_pieces(parts)
        return Info(parts[0].dtype, tuple(parts[0].shape))

    def read(self, name: str) -> torch.Tensor:
        self._num_bytes += self.infos[name].num_bytes
        with _explained_piece(self._paths[0].parent, name):
            return shards.join_pieces(self._parts(name))

    def let_go(self) -> None:
        if self._num_bytes > OPEN_PICKLED_BYTES:
            self._loaded = []
            self._num_bytes = 0


def _words(found: tuple) -> str:
    dtype, shape, lies = found
    return f"{dtype} {shape}, {lies}"


@contextlib.contextmanager
def _explained_piece(directory: Path, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{directory}: {name}: {error}") from None


class Distributed:
    """A directory that torch.distributed.checkpoint wrote, on any number of ranks."""

    def __init__(self, directory: Path) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._directory = directory
        self._reader, metadata = _reader_of(directory)
        self.metadata: dict[str, str] = {}
        self.infos = {
            name: Info(entry.properties.dtype, tuple(entry.size))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        for place in metadata.storage_data.values():
            if not (directory / place.relative_path).exists():
                raise ValueError(f"{directory / place.relative_path}: is missing; {directory} is not complete")

    def read(self, name: str) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp

        dtype, shape = self.infos[name]
        out = {name: torch.empty(shape, dtype=dtype)}
        with _explained(self._directory), _silent():
            try:
                dcp.load(out, storage_reader=self._reader, no_dist=True)
            except dcp.CheckpointException as error:  # of one "rank": what happened on it
                cause = next(iter(error.failures.values()))
                raise cause[0] if isinstance(cause, tuple) else cause from error
        return out[name]

    def let_go(self) -> None:
        pass


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """torch tells at every load that there is no process group."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reader_of(directory: Path):
    """A reader whose metadata is unpickled by an allow-list: torch's own reader would run whatever it says."""
    from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata, planner

    allowed: dict[tuple[str, str], object] = {}
    for module in (metadata, filesystem, planner):
        for name in dir(module):
            value = getattr(module, name)
            if isinstance(value, type) and value.__module__ == module.__name__:
                allowed[value.__module__, name] = value
    for value in (torch.Size, torch.dtype, torch.device):
        allowed["torch", value.__name__] = value
    allowed["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    # torch puts the path of the checkpoint there. Python 3.13 has the classes in a module of their own.
    for module_name in ("pathlib", "pathlib._local"):
        allowed[module_name, "PosixPath"] = allowed[module_name, "PurePosixPath"] = PurePosixPath
        allowed[module_name, "WindowsPath"] = allowed[module_name, "PureWindowsPath"] = PureWindowsPath
    allowed["builtins", "getattr"] = _member

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str):
            if (module, name) in allowed:
                return allowed[module, name]
            if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            if (module, name) in (("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset")):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    path = directory / ".metadata"
    with _explained(path):
        found = Unpickler(io.BytesIO(path.read_bytes())).load()
    if not isinstance(found, metadata.Metadata):
        raise ValueError(f"{path}: holds a {type(found).__name__}, expected torch.distributed.checkpoint's Metadata")

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            return found

    return Reader(directory), found


def _member(kind: object, name: str) -> object:
    """For `getattr` in a pickle, by which Python 3.11 names the members of an enum: of an enum, and nothing but its members."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"getattr of {kind!r} is not allowed")


def in_directory(directory: Path, stem: str) -> Tensors | None:
    """`stem`.safetensors or .bin in a directory, or the files that its index names; None where there is neither.

    Raises ValueError for an index that names missing files, and for files of the stem that it does not name.
    """
    for suffix, kind in (("safetensors", Safetensors), ("bin", Pickled)):
        stems = (stem,) if suffix == "safetensors" or stem != "model" else ("pytorch_model",)
        for each in stems:
            found = _of_stem(directory, each, suffix, kind)
            if found is not None:
                return found
    return None


def _of_stem(directory: Path, stem: str, suffix: str, kind: Callable) -> Tensors | None:
    single, index = directory / f"{stem}.{suffix}", directory / f"{stem}.{suffix}.index.json"
    numbered = sorted(directory.glob(f"{stem}-*-of-*.{suffix}"))
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: has no weight_map")
        files = {name: directory / str(file) for name, file in weight_map.items()}
        for path in dict.fromkeys(files.values()):
            if path.resolve().parent != directory.resolve() and path.parent != directory:
                raise ValueError(f"{index}: names {path}, which is not in its directory")
            if not path.exists():
                raise ValueError(f"{path}: is missing, {index.name} names it")
        for path in [*numbered, *([single] if single.exists() else [])]:
            if path not in files.values():
                raise ValueError(
                    f"{path}: is not named in {index.name}; remove it if it is left over from another save"
                )
        return kind(files)
    if numbered:
        raise ValueError(f"{index}: is missing; {numbered[0].name} and others are there")
    return kind([single]) if single.exists() else None


def read_json(path: Path) -> dict:
    """Raises ValueError for what is no JSON object."""
    import json

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, expected a JSON object")
    return found

"""Files and directories that are whole or not there: written aside, flushed to the disk, and renamed into their place."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` this content; who reads it meanwhile gets the old or the new one. Makes its directory if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: several processes may write the same file at once.
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # mkstemp's is for the owner alone
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    flush_directory(path.parent)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which is `path` once all went well, and gone if not. A process that is killed leaves the one beside
    it, `.NAME.*.partial`, and no `path`.

    An empty directory that is there already may be a mount point, to which nothing can be renamed: it is filled aside inside
    it, and the files are moved up, config.json last, without which it is no checkpoint.

    Raises FileExistsError where `path` is a file or a directory with something in it, before and after.
    """
    check_is_free(path)
    is_there = path.is_dir()
    beside = path if is_there else path.parent
    beside.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=beside, prefix=f".{path.name}.", suffix=_PARTIAL))
    try:
        yield aside
        os.chmod(aside, 0o777 & ~_umask())
        flush_directory(aside)
        if is_there:
            _move_up(aside, path)
        else:
            try:
                os.rename(aside, path)  # onto nothing, or onto an empty directory
            except OSError as error:
                check_is_free(path)  # somebody else was first
                raise error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    flush_directory(beside)


_PARTIAL = ".partial"
_CLAIM = ".moving.partial-claim"  # who has made it moves its files up, and nobody else


def _move_up(aside: Path, path: Path) -> None:
    check_is_free(path)
    claim = path / _CLAIM
    try:
        claim.mkdir()
    except FileExistsError:
        check_is_free(path)  # says that somebody else was first
        raise
    moved: list[Path] = []
    try:
        for each in sorted(aside.iterdir(), key=lambda each: each.name == "config.json"):
            os.rename(each, path / each.name)
            moved.append(path / each.name)
    except BaseException:
        for each in moved:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        raise
    finally:
        claim.rmdir()
    aside.rmdir()


def check_is_free(path: Path) -> None:
    """A file system's own directory, and what a killed process has left, are nothing."""
    if path.is_dir():
        found = [
            each.name
            for each in path.iterdir()
            if each.name != "lost+found" and not (each.name.startswith(".") and each.name.endswith(_PARTIAL))
        ]
        is_free = not found
    else:
        is_free = not (path.is_symlink() or path.exists())
    if not is_free:
        raise FileExistsError(f"{path}: is there already; name a directory that does not exist or is empty")


def flush_directory(path: Path) -> None:
    """What was renamed in it stays so through a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Without changing it: other threads make files too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022

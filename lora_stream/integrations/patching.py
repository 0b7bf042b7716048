"""Methods of others' classes, replaced until they are put back."""

from collections.abc import Callable
from importlib import metadata


class Patch:
    """What was replaced, in order. A context manager, too: leaving it puts everything back."""

    def __init__(self, distribution: str, versions: str) -> None:
        """distribution: whose classes they are. versions: of it, that the replacements are written for, for messages."""
        self._distribution, self._versions = distribution, versions
        self._replaced: list[tuple[type, str, object, object]] = []

    def replace(self, owner: type, name: str, make: Callable[[Callable], Callable]) -> None:
        """Put ``make(the method as it is)`` in its place. Raises ValueError, everything put back, where there is none."""
        original = vars(owner).get(name)
        if original is None:
            self.undo()
            raise ValueError(
                f"{self._distribution} {metadata.version(self._distribution)}: {owner.__name__} has no method {name!r} of its "
                f"own; this drop-in is written for {self._distribution} {self._versions}: install that, or a newer lora_stream"
            )
        replacement = make(original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))

    def undo(self) -> None:
        """Put the originals back; once is enough. Raises RuntimeError where somebody has replaced ours since."""
        for owner, name, _, replacement in self._replaced:
            if vars(owner).get(name) is not replacement:
                raise RuntimeError(
                    f"{owner.__name__}.{name} was patched again after this patch: undo patches in the reverse order"
                )
        while self._replaced:
            owner, name, original, _ = self._replaced.pop()
            setattr(owner, name, original)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

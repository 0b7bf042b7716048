"""A base model's directory, from which a merge takes what its source does not hold: which of its tensors is which of the model's,
and whether it is whole, unquantised, and not merged already.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lora_stream.checkpoint import models
from lora_stream.checkpoint.assembling import Assembly
from lora_stream.checkpoint.rest import Rest, is_computed, rest_of
from lora_stream.checkpoint.tensors import Info, Tensors, in_directory
from lora_stream.peft import read_model
from lora_stream.plan import Plan, Task, listed

logger = logging.getLogger("lora_stream")

# In the metadata of the files that a merge writes: which adapters they hold, by digest.
MERGED_KEY = "lora_stream.merged_adapters"


class Base:
    """rest: its tensors that the plan does not read, once `fits`, `load_whole` or `look_through` has looked."""

    def __init__(self, directory: Path, assembly: Assembly) -> None:
        """Raises ValueError for a directory that is no full-precision model."""
        self.directory, self._assembly = directory, assembly
        self._config = models.config_of(directory, trust_remote_code=assembly.trust_remote_code)
        tensors = in_directory(directory, "model")
        if tensors is None:
            raise ValueError(f"{directory}: has a config.json but no model.safetensors or pytorch_model.bin")
        self.tensors: Tensors = tensors
        self.rest = Rest()
        self._carried: dict[int, str] = {}  # id of a base tensor -> its name here

    @property
    def merged_adapters(self) -> list[str]:
        return self.tensors.metadata.get(MERGED_KEY, "").split()

    def place(self, task: Task) -> str | None:
        """What is called here what a task reads."""
        names = [*self._assembly.places.get((id(task.base), task.view), []), self._carried.get(id(task.base))]
        return next((name for name in names if name in self.tensors.infos), None)

    def fits(self, plan: Plan, untie: bool) -> bool:
        """Whether all that the plan reads here is here, under the names that transformers writes today.

        Raises ValueError where the adapter is merged into it already, where it is another model, and where tied tensors differ.
        """
        if self._assembly.digest in self.merged_adapters:
            raise ValueError(
                f"{self.directory}: this adapter is merged into it already; its delta would count twice. Name the base that it "
                "was trained on"
            )
        if self._missing(plan):
            return False
        self._set_rest(self._rest(plan, self.tensors.infos))
        for names in self._assembly.places.values():
            self._check_same([name for name in names if name in self.tensors.infos], untie)
        return True

    def look_through(self, plan: Plan) -> None:
        """For what a source that holds all of the model does not hold: the model had no module for it."""
        if not self._lacking([task for task in plan.tasks if not task.trained]):
            self._set_rest(self._rest(plan, self.tensors.infos))

    def _set_rest(self, rest: Rest) -> None:
        self.rest = rest
        self._carried = {id(record.tensor): record.name for record in rest.carried}
        if rest.carried:
            logger.warning(
                "%s: %s: %s has no module for it; carried over as it is",
                self.directory,
                listed([record.name for record in rest.carried]),
                type(self._assembly.base_model).__name__,
            )

    def _missing(self, plan: Plan) -> list[str]:
        """What should be here and is not."""
        return self._lacking([task for task in plan.tasks if task.base.is_meta and not self._assembly.has(task)])

    def _lacking(self, tasks: Sequence[Task]) -> list[str]:
        return [task.meta.name for task in tasks if self.place(task) is None]

    def _rest(self, plan: Plan, infos: Mapping[str, Info]) -> Rest:
        """Raises ValueError for a tensor that this directory's own config has a module for, and the assembly's has not."""
        assembly = self._assembly
        rest = rest_of(
            infos,
            self.directory,
            assembly.base_model,
            written={meta.name for meta in plan.metadata()},
            places=assembly.places.values(),
        )
        if rest.carried and assembly.config_directory != self.directory:
            own = models.empty_model(self._config, where=self.directory, trust_remote_code=assembly.trust_remote_code)
            known = {record.name for record in read_model(own, untie=True).records}
            if odd := [record.name for record in rest.carried if record.name in known]:
                raise ValueError(
                    f"{self.directory}: {listed(odd)}: the model of {assembly.config_directory} has no place for it; --base is "
                    "another model"
                )
        return rest

    def _check_same(self, names: list[str], untie: bool) -> None:
        """Tied tensors that are here twice must be equal."""
        for name in names[1:]:
            if not untie and not torch.equal(*(self.tensors.read(each) for each in (names[0], name))):
                raise ValueError(
                    f"{self.directory}: {names[0]} and {name} are tied by its config but differ; pass --untie to write both"
                )

    def load_whole(self, plan: Plan) -> None:
        """Names that are older than those that transformers writes: it knows them, if anybody, and puts the weights into the
        assembly. Raises ValueError where it does not."""
        missing = self._missing(plan)
        base_model = self._assembly.base_model
        kind = type(base_model)
        # What the class lists as ignorable is otherwise not told. (A property: instances add what their children list, to
        # nothing.)
        lists_nothing = property(lambda self: set(), lambda self, value: None)
        own = {"_keys_to_ignore_on_load_unexpected": lists_nothing, "__module__": kind.__module__}
        telling = type(kind.__name__, (kind,), own)
        model, info = telling.from_pretrained(
            self.directory,
            config=base_model.config,
            dtype="auto",
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=self._assembly.trust_remote_code,
        )
        model.__class__ = kind
        lacking = sorted(set(info["missing_keys"]) & set(missing))
        # Under the name that transformers gives it; of one that it has made itself the file's own is not known.
        unexpected = sorted(info["unexpected_keys"])
        renamed = [name for name in unexpected if name not in self.tensors.infos]
        for names, what in ((lacking, "is not there"), (renamed, "the model has no place for it")):
            if names:
                raise ValueError(f"{self.directory}: {listed(names)}: {what}; --base is another model, or not whole")
        if info["mismatched_keys"]:
            raise ValueError(f"{self.directory}: {info['mismatched_keys']}: of another shape than the config says")
        rest = {*unexpected, *filter(is_computed, self.tensors.infos)}
        self._set_rest(self._rest(plan, {name: info for name, info in self.tensors.infos.items() if name in rest}))
        logger.warning(
            "%s: %s is not there; transformers knew the names of old and has loaded it whole, which takes the memory of the base",
            self.directory,
            missing[0],
        )
        self._assembly.use_loaded(model.requires_grad_(False))

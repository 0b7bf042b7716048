"""A base model's directory, from which a merge takes what its source does not hold: which of its tensors is which of the model's,
and whether it is whole, unquantised, and not merged already.
"""

import logging
from pathlib import Path

import torch

from lora_stream.checkpoint import models
from lora_stream.checkpoint.assembling import Assembly, is_ignored
from lora_stream.checkpoint.tensors import Tensors, in_directory, read_json
from lora_stream.plan import Plan, Task, listed

logger = logging.getLogger("lora_stream")

# In the metadata of the files that a merge writes: which adapters they hold, by digest.
MERGED_KEY = "lora_stream.merged_adapters"


class Base:
    """left_out: its tensors for which the model of the adapter's task has no place: another head."""

    def __init__(self, directory: Path, assembly: Assembly) -> None:
        """Raises ValueError for a directory that is no full-precision model."""
        self.directory, self._assembly = directory, assembly
        models.config_of(directory, trust_remote_code=assembly.trust_remote_code)
        tensors = in_directory(directory, "model")
        if tensors is None:
            raise ValueError(f"{directory}: has a config.json but no model.safetensors or pytorch_model.bin")
        self.tensors: Tensors = tensors
        self.left_out: list[str] = []

    @property
    def merged_adapters(self) -> list[str]:
        return self.tensors.metadata.get(MERGED_KEY, "").split()

    def place(self, task: Task) -> str | None:
        """What is called here what a task reads."""
        names = self._assembly.places.get((id(task.base), task.view), [])
        return next((name for name in names if name in self.tensors.infos), None)

    def fits(self, plan: Plan, untie: bool) -> bool:
        """Whether all that the plan reads here is here, and nothing else, under the names that transformers writes today.

        Raises ValueError where the adapter is merged into it already, and where tied tensors differ.
        """
        if self._assembly.digest in self.merged_adapters:
            raise ValueError(
                f"{self.directory}: this adapter is merged into it already; its delta would count twice. Name the base that it "
                "was trained on"
            )
        extra = self._extra()
        self.left_out = [name for name in extra if self._is_of_another_head(name)]
        if self._missing(plan) or len(extra) > len(self.left_out):
            return False
        for names in self._assembly.places.values():
            self._check_same([name for name in names if name in self.tensors.infos], untie)
        return True

    def _missing(self, plan: Plan) -> list[str]:
        """What should be here and is not."""
        wanted = [task for task in plan.tasks if task.base.is_meta and not self._assembly.has(task)]
        return [task.meta.name for task in wanted if self.place(task) is None]

    def _extra(self) -> list[str]:
        """What is here and has no place in the model."""
        known = {name for names in self._assembly.places.values() for name in names}
        base_model = self._assembly.base_model
        return [name for name in self.tensors.infos if name not in known and not is_ignored(base_model, name)]

    def _is_of_another_head(self, name: str) -> bool:
        """Whether the model is of another kind than this directory's, and without the module at the top that this is in."""
        found = read_json(self.directory / "config.json").get("architectures") or []
        base_model = self._assembly.base_model
        return type(base_model).__name__ not in found and name.split(".")[0] not in base_model._modules

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
        missing, extra = self._missing(plan), self._extra()
        base_model = self._assembly.base_model
        model, info = type(base_model).from_pretrained(
            self.directory,
            config=base_model.config,
            dtype="auto",
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=self._assembly.trust_remote_code,
        )
        lacking = sorted(set(info["missing_keys"]) & set(missing))
        left_over = sorted(name for name in info["unexpected_keys"] if not self._is_of_another_head(name))
        for names, what in ((lacking, "is not there"), (left_over, "the model has no place for it")):
            if names:
                raise ValueError(f"{self.directory}: {listed(names)}: {what}; --base is another model, or not whole")
        if info["mismatched_keys"]:
            raise ValueError(f"{self.directory}: {info['mismatched_keys']}: of another shape than the config says")
        logger.warning(
            "%s: %s; transformers knew the names of old and has loaded it whole, which takes the memory of the base",
            self.directory,
            f"{missing[0]} is not there" if missing else f"{extra[0]} is not a name that the model has",
        )
        self._assembly.use_loaded(model.requires_grad_(False))

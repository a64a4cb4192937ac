"""Saving and loading through DeepSpeed's calls: one tag on all ranks, and plain state dictionaries, whole on every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero import comm
from megazero.checkpoint.loader import newest_tag
from megazero.engine import Engine
from megazero.files import written_aside
from megazero.json_config import JsonConfig
from megazero.logging import ALIKE, get_logger, some
from megazero.mpu.partition import partitions
from megazero.zero import access
from megazero.zero.tiling import cut_whole, join_tiles

logger = get_logger(__name__)


class CheckpointingEngine(Engine):
    """`Engine` whose checkpoint methods take DeepSpeed's arguments and also store the sample count."""

    config: JsonConfig
    global_samples = 0

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **options: Any,
    ) -> bool:
        """Writes a checkpoint that any number of ranks can load, and returns True. Collective over the world.

        Args:
            tag: the checkpoint's name, converted with `str`; default: global_step{N}. If ranks pass different tags, the first
                rank's is used, unless `checkpoint.tag_validation` makes that an error.
            options: those of `Engine.save_checkpoint` (keep_last, in_background, ...).

        Raises:
            ValueError: `save_dir` is empty.
            TypeError: the tag is a dict: the client state, which would be lost.
            AssertionError: ranks give different tags, and `checkpoint.tag_validation` is FAIL.
            Exception: see `Engine.save_checkpoint`.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint needs a directory, got save_dir={save_dir!r}.")
        if isinstance(tag, Mapping):
            raise TypeError("save_checkpoint: the tag is a dict. Pass the client state by name: client_state=...")
        self._training_state.counters["global_samples"] = int(self.global_samples)  # which a script may set, to numpy's
        super().save_checkpoint(
            save_dir,
            self._agreed_tag(tag),
            client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
            **options,
        )
        return True

    def _agreed_tag(self, tag: object) -> str | None:
        comm.meet_world("save_checkpoint", self.channel.timeout_s)
        tags = comm.all_gathered_objects(None if tag is None else str(tag))
        if len(set(tags)) > 1 and self.config.checkpoint.tag_validation != "IGNORE":
            different = some([str(each) for each in dict.fromkeys(tags)])
            message = f"ranks give different checkpoint tags: {different}. Give the same one on every rank."
            if self.config.checkpoint.tag_validation == "FAIL":
                raise AssertionError(message)
            logger.warning("%s The first rank's counts.", message, extra=ALIKE)
        return tags[0]

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
        **options: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continues from a checkpoint of any number of ranks, any stage and any precision. Collective over the world.

        Without `load_optimizer_states` the optimizer starts with empty moments; the fp32 master weights are still the saved ones.

        Args:
            tag: the checkpoint's name, converted with `str`; default: the one that `latest` names. The first rank's counts.
            load_module_only: load only the weights; counters, schedule and optimizer stay as they are.
            options: those of `Engine.load_checkpoint` (load_rng, fallback, ...).

        Returns:
            The checkpoint's directory and the client state, or (None, None) with a warning if there is no checkpoint.

        Raises:
            NotImplementedError: `custom_load_fn` was given.
            ValueError: `load_dir` is empty.
            Exception: see `Engine.load_checkpoint`.
        """
        if custom_load_fn is not None:
            raise NotImplementedError(
                "load_checkpoint(custom_load_fn=...): parameters are read in parts, never as a whole state dictionary. Take "
                "that from megazero.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint, change it, and give it to "
                "engine.load_module_state_dict."
            )
        if not load_dir:
            raise ValueError(f"load_checkpoint needs a directory, got load_dir={load_dir!r}.")
        comm.meet_world("load_checkpoint", self.channel.timeout_s)
        self.wait_for_checkpoint()  # it may be the one to load
        name: str | None = comm.broadcast_object(None if tag is None else str(tag))
        if name is None:
            name = newest_tag(load_dir, options.get("fallback", False))
        if name is None:
            is_there = os.path.isdir(load_dir)
            why = "has no file `latest`; name a checkpoint by tag" if is_there else "is no directory"
            if os.path.isfile(os.path.join(load_dir, "latest_universal")):
                why = (
                    "holds a universal checkpoint of DeepSpeed's. Make one of it that can be loaded: `python -m "
                    f"megazero.checkpoint import --from deepspeed {load_dir} OUT`"
                )
            logger.warning("nothing is loaded: %s %s", load_dir, why, extra=ALIKE)
            return None, None
        path, client = super().load_checkpoint(
            load_dir,
            name,
            strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            **options,
        )
        if not load_module_only:
            self.global_samples = self._training_state.counters.get("global_samples", 0)
        return str(path), client

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes a plain, full state dictionary in the training dtype; returns whether it did. Collective over the world.

        Tiled layers are saved whole, as in a checkpoint.

        At stage 3 this needs `stage3_gather_16bit_weights_on_model_save`, because the whole model goes into the first rank's host
        memory.

        Raises:
            OSError: the file could not be written; the other ranks raise OtherRankError.
            MemoryError, RuntimeError: the first rank had no memory for the model; the others as above.
        """
        if self.sharding.parameters and not self.config.zero_optimization.gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model wrote nothing: set stage3_gather_16bit_weights_on_model_save to gather the weights.",
                extra=ALIKE,
            )
            return False
        self._refuse_changed_model("save_16bit_model()")
        self.channel.meet("save_16bit_model")
        self._optimizer.finish()
        named, cuts = dict(self.module.named_parameters(remove_duplicate=False)), partitions(self.module)
        cut_of = {id(named[name]): cut for name, cut in cuts.items()} if self.groups.model_parallel_size > 1 else {}
        is_first = torch.distributed.get_rank() == 0
        failures: list[Exception] = []

        def kept(value: Any) -> Any:
            """What is written, on the first rank alone: parameters are merged over the tensor-parallel ranks."""
            cut = cut_of.get(id(value))
            shards = [] if cut is None else comm.all_gathered(value.detach(), self.groups.model)
            if not is_first or failures:
                return None
            try:
                return access.copied(value) if cut is None else cut.merge([shard.cpu() for shard in shards])
            except Exception as error:  # no memory: told at the end, as the other ranks go on gathering
                failures.append(error)

        state = access.state_dict(self.module, self.buckets, exclude_frozen_parameters, kept)

        def write() -> None:
            if failures:
                raise failures[0]
            os.makedirs(save_dir, exist_ok=True)
            with written_aside(Path(save_dir) / save_filename) as file:
                torch.save(join_tiles(state, self._training_state.tiles), file)

        self.saver.on_first_rank(write)
        return True

    save_fp16_model = save_16bit_model

    def load_module_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> None:
        """Loads full values, the same on every rank, into the module, however it is sharded. Collective.

        For tiled layers it accepts the whole layer's parameters as well as tiles.

        Raises:
            RuntimeError: names are missing or unknown (with `strict`), or a value is no tensor or of another shape, on some rank;
                or ranks were given other names. Nothing has been written in that case.
        """
        known, state_dict = self.module.state_dict(keep_vars=True), dict(state_dict)

        def cut() -> None:
            errors = cut_whole(state_dict, {name: p for name, p in self._training_state.tiles.items() if name in known})
            if errors:
                raise RuntimeError(f"load_module_state_dict: {' '.join(errors)}")

        self._refuse_changed_model("load_module_state_dict()")
        self.channel.meet("load_module_state_dict")
        comm.together(cut)
        self._optimizer.finish()
        access.load_state_dict(self.module, self.buckets, state_dict, strict)

"""Checkpoints of the engine: DeepSpeed's files, put in place as a whole, resumed bit for bit, moved to other splits."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import logger

from . import folders, layout, portable, resume
from .optimizers import IDLE


class Checkpointing:
    """The part of the engine that saves and loads; a mixin before DeepSpeed's engine.

    DeepSpeed's own files stay as they are, so that checkpoints go either way. Beside them lie a manifest, one small file a
    rank with its random state, and layer files of tied modules that DeepSpeed leaves out.
    """

    @property
    def consumed_micro_batches(self) -> int:
        """Micro-batches that each replica has trained on since the first step, over all resumed runs.

        A script that reads its own data goes on there after ``load_checkpoint``.
        """
        return self.global_samples // (self.train_micro_batch_size_per_gpu() * self.dp_world_size)

    # ---------------------------------------------------------------------------------------------------- saving

    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False):
        """As upstream's, but the checkpoint is there as a whole or not at all, also if it replaces one of the same tag.

        Files are written to ``TAG.saving``, which takes the name of the tag when all ranks are done; ``latest`` follows
        last. A process that is killed at any moment leaves the last good checkpoint, or the new one.

        Raises:
            ValueError: the ranks gave different tags.
            RuntimeError: a rank could not write; raised on every rank with that rank's error. Nothing is replaced, and
                training may go on.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        with self._faults.watching("save_checkpoint", step=False):
            if not isinstance(self.checkpoint_engine, (TorchCheckpointEngine, FastCheckpointEngine)):
                # Written behind the training's back: only upstream knows when it is complete.
                return super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
            failure = self._save_aside(Path(save_dir), tag, client_state, save_latest, exclude_frozen_parameters)
        if failure is not None:
            raise failure
        return True

    def _save_aside(self, save_dir, tag, client_state, save_latest, exclude_frozen) -> Exception | None:
        folder = save_dir / tag
        told = _gather((tag, self._leading(lambda: folders.begin(folder))))
        if len({given for given, _ in told}) > 1:
            self._leading(lambda: shutil.rmtree(folders.aside(folder), ignore_errors=True))
            return ValueError("save_checkpoint got different tags: "
                              + ", ".join(f"{given!r} on rank {rank}" for rank, (given, _) in enumerate(told)))
        if failure := _failure("save_checkpoint", [failed for _, failed in told]):
            return failure
        writer, places = folders.Writer(self.checkpoint_engine), {}
        self.checkpoint_engine = writer
        try:
            with self._portable_shards():
                super().save_checkpoint(str(save_dir), tag + folders.SAVING, self._with_shapes(client_state), False,
                                        exclude_frozen)
            writer.save(resume.random_states(), str(folders.aside(folder) / self._rank_file()))
        finally:
            self.checkpoint_engine = writer.engine
        if self.save_non_zero_checkpoint and (names := portable.names(self)) is not None:
            places = {Path(self._get_ckpt_name("", "")).name: names}
        told = _gather((writer.error and str(writer.error), places))
        if failure := _failure("save_checkpoint", [failed for failed, _ in told], writer.error):
            self._leading(lambda: shutil.rmtree(folders.aside(folder), ignore_errors=True))
            return failure
        described = layout.described(self)
        described["optimizer_parameters"] = {file: names for _, places in told for file, names in places.items()}
        failed = self._leading(lambda: folders.finish(folder, described))
        if failed is None and save_latest:
            failed = self._leading(lambda: folders.point(save_dir, tag))
        return _failure("save_checkpoint", _gather(failed))

    @property
    def _leads(self) -> bool:
        """True on the rank that moves folders and looks after files, one for each disk."""
        return (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0

    def _leading(self, action: Callable[[], None]) -> str | None:
        """Runs ``action`` on the rank that leads; returns what went wrong."""
        if not self._leads:
            return None
        try:
            action()
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _rank_file(self) -> str:
        return f"ds_pipe_ext_rank_{self.global_rank:05d}.pt"

    def _with_shapes(self, client_state: dict) -> dict:
        if layout.is_sharded(self) and not self.zero_optimization():
            # BF16_Optimizer without ZeRO: upstream leaves out what the conversion to the universal format reads.
            return {**client_state, "param_shapes": self._get_zero_param_shapes()}
        return client_state

    def _get_zero_param_shapes(self):
        shapes = super()._get_zero_param_shapes()
        for group in shapes:
            group.pop(IDLE, None)
        return shapes

    @contextlib.contextmanager
    def _portable_shards(self):
        """Meanwhile shards claim what other stages do not: upstream's conversion would mix the copies of a tied weight."""
        optimizer, module = self.optimizer, self.module
        if not layout.is_sharded(self):
            yield
            return
        whole = optimizer._param_slice_mappings
        optimizer._param_slice_mappings = [
            type(group)((name, place) for name, place in group.items() if portable.is_first_copy(module, name))
            for group in whole]
        try:
            yield
        finally:
            optimizer._param_slice_mappings = whole

    def _copy_recovery_script(self, save_path):
        copy = functools.partial(super()._copy_recovery_script, save_path)
        if isinstance(self.checkpoint_engine, folders.Writer):
            self.checkpoint_engine.attempt(f"{save_path}/zero_to_fp32.py", copy)
        else:
            copy()

    def module_state_dict(self, exclude_frozen_parameters=False):
        """As upstream's, and the tied modules that it leaves out."""
        result = super().module_state_dict(exclude_frozen_parameters)
        if self.grid.get_data_parallel_id() == 0:
            for layer, tied in portable.unwritten(self.module).items():
                state = tied.state_dict()
                if exclude_frozen_parameters:
                    for name in self.module._get_frozen_parameter_names(tied):
                        del state[name]
                path = self.module.ckpt_layer_path(self._curr_ckpt_path, layer - self.module._local_start)
                self.checkpoint_engine.save(clone_tensors_for_torch_save(state), path)
        return result

    # ---------------------------------------------------------------------------------------------------- loading

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):
        """As upstream's, for other splits too, and with random numbers and data where they were.

        In fp32 without ZeRO, optimizer state goes to any boundaries and numbers of stages and replicas; with ZeRO 1 or bf16
        it goes there after ``ds-pipe convert``; weights alone always do. Random states are restored at the same layout
        only. A loader that the engine made of ``training_data`` goes on where it was; other data:
        :attr:`consumed_micro_batches`.

        Returns:
            As upstream: (path, client state), or (None, None) without a ``latest`` file.

        Raises:
            ValueError: files are missing or damaged, or the optimizer state is of another layout and cannot move; on
                every rank, mostly before anything of this engine is changed.
        """
        options = {"load_module_strict": load_module_strict, "load_lr_scheduler_states": load_lr_scheduler_states,
                   "load_module_only": load_module_only, "custom_load_fn": custom_load_fn}
        optimizer_too = load_optimizer_states and not load_module_only and self.optimizer is not None
        with self._faults.watching("load_checkpoint", step=False):
            tag, failure = self._tag_to_load(Path(load_dir), tag)
            if tag is None and failure is None:
                return super().load_checkpoint(load_dir, tag, load_optimizer_states=load_optimizer_states, **options)
            if failure is None:
                manifest, moved, failure = self._examine(Path(load_dir, tag), load_module_strict, optimizer_too)
            if failure is None:
                return self._load(load_dir, tag, manifest, moved, load_optimizer_states, options)
        raise failure

    def _tag_to_load(self, load_dir: Path, tag) -> tuple[str | None, Exception | None]:
        latest = load_dir / ("latest_universal" if self.load_universal_checkpoint() else "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        tag = None if tag is None else str(tag)
        failed = None if tag is None else self._leading(lambda: folders.recover(load_dir / tag))
        told = _gather((tag, failed))
        if len({given for given, _ in told}) > 1:
            return None, ValueError("load_checkpoint would load different tags: "
                                    + ", ".join(f"{given!r} on rank {rank}" for rank, (given, _) in enumerate(told)))
        return tag, _failure("load_checkpoint", [failed for _, failed in told])

    def _examine(self, folder: Path, strict: bool, optimizer_too: bool) -> tuple[dict | None, bool, Exception | None]:
        """The manifest, whether optimizer state has to be moved, and what is wrong on any rank."""
        manifest, moved, problem = None, False, None
        try:
            manifest = layout.examined(self, folder, strict)
            if manifest is not None and self._leads and (damages := folders.damages(folder, manifest)):
                raise ValueError("; ".join(damages))
            if optimizer_too and not self.load_universal_checkpoint():
                if manifest is None:
                    layout.check_foreign(self, folder)
                else:
                    moved = not layout.fits(self, manifest, folder)
        except ValueError as error:
            problem = str(error)
        return manifest, moved, _failure("load_checkpoint", _gather(problem), kind=ValueError)

    def _load(self, load_dir, tag, manifest, moved, load_optimizer_states, options):
        folder = Path(load_dir, tag)
        module_only, universal = options["load_module_only"], self.load_universal_checkpoint()
        # BF16_Optimizer without ZeRO writes shards too, which upstream does not read.
        overlooked = layout.is_sharded(self) and not self.zero_optimization()
        reader = folders.Reader(self.checkpoint_engine)
        self.checkpoint_engine = reader
        try:
            if universal:
                self._before_universal(folder, options["load_module_strict"])
            path, client_state = super().load_checkpoint(
                load_dir, tag, load_optimizer_states=load_optimizer_states and not moved and not overlooked, **options)
            if moved or overlooked:
                client_state.pop("optimizer", None)
            if moved:
                state = portable.moved_state(self, manifest["optimizer_parameters"],
                                             lambda file: reader.load(str(folder / file), map_location="cpu"))
                self.optimizer.load_state_dict(state)
                client_state["optimizer"] = state
            elif overlooked and (universal or load_optimizer_states and not module_only):
                self._load_zero_checkpoint(load_dir, tag, load_optimizer_states=True)
                if universal:
                    self.optimizer.update_lp_params()
            elif not universal and not load_optimizer_states and hasattr(self.optimizer, "refresh_fp32_params"):
                # Otherwise the first step would bring the old weights back from the optimizer's copy.
                self.optimizer.refresh_fp32_params()
        except Exception as error:
            if reader.last:
                error.add_note(f"the last file that was read is {reader.last}")
            raise
        finally:
            self.checkpoint_engine = reader.engine
        if not module_only:
            self._go_on(folder, manifest)
        return path, client_state

    def load_module_state_dict(self, checkpoint, strict=True, **kwargs):
        """As upstream's, and the tied modules that it leaves out."""
        if not self.has_moe_layers and checkpoint["module"] is None:
            portable.load_unread(self.module, Path(self._curr_ckpt_path), self.checkpoint_engine, strict)
        super().load_module_state_dict(checkpoint, strict, **kwargs)

    def _before_universal(self, folder: Path, strict: bool) -> None:
        """What upstream does not read from a universal checkpoint: frozen weights and buffers; and a stage without weights."""
        if not portable.absent_layers(self.module, folder):
            self._curr_ckpt_path = str(folder)
            self.load_module_state_dict({"module": None}, strict)
        for param, name in self.param_names.items():
            if name == IDLE:
                param.load_hp_checkpoint_state = lambda *_, place=param, **__: setattr(place._hp_mapping, "optim_fragment", {})

    def _go_on(self, folder: Path, manifest: dict | None) -> None:
        resume.start_at(self.training_dataloader, self.consumed_micro_batches)
        if manifest is None:
            return
        self.module.micro_offset = manifest["micro_offset"]
        path = folder / self._rank_file()
        if layout.same_ranks(self, manifest["layout"]) and path.exists():
            resume.restore_random_states(self.checkpoint_engine.load(str(path), map_location="cpu"))
        elif self.global_rank == 0:
            logger.warning(f"{folder} was saved with {layout.words(manifest['layout'])}: random states stay as they are here, "
                           "so dropout draws other numbers than it would have")


def _gather(value) -> list:
    """Every rank's value, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _failure(what: str, problems: list[str | None], cause: Exception | None = None, kind=RuntimeError) -> Exception | None:
    """One exception for all ranks, of the sentences that some of them gave."""
    ranks: dict[str, list[str]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            ranks.setdefault(problem, []).append(str(rank))
    if not ranks:
        return None
    failure = kind(f"{what} failed: " + "; ".join(
        f"{problem} (rank{'s' * (len(where) > 1)} {', '.join(where)})" for problem, where in ranks.items()))
    failure.__cause__ = cause
    return failure

"""Checkpoints: saved in pieces by the ranks that hold them, resumed on any other layout.

A folder holds one checkpoint for each time that one was saved, step-00000020 and so on. In it every value stands under
its name in the whole model and at its place in the whole matrix, whoever held it: so the ranks of another layout find
what they need. Each rank writes the pieces of AdamW's state that ZeRO left it, of copies one; nothing is gathered. The
format is that of `torch.distributed.checkpoint`, which reads it too. It is for files of one's own: its index is a
pickle, and a pickle from a stranger can run anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fivefold.model import GPTConfig
from fivefold.pieces import Piece, pieces
from fivefold.runtime.renamed import all_gather_single
from fivefold.train import Trainer

RECORD = "checkpoint.json"
FREE = {"seed", "dtype", "balance_weight"}  # of the model's settings, those that may differ when training goes on


def save(trainer: Trainer, folder: str | Path, step: int) -> Path:
    """Save the model and AdamW's state after `step` steps, in a new folder below `folder`, which is returned.

    To be called on every rank; `folder` is one that all ranks see. The files are written beside, in a folder whose name
    no reader looks at, and that is renamed when the last of them is on the disk. So a checkpoint is there whole or not
    at all, whenever a rank or the machine stops. What an earlier save left unfinished is removed, and so is an older
    checkpoint of the same step, once the new one is there.
    """
    folder = Path(folder)
    beside = folder / f".writing-{step:08d}"
    path = _free_name(folder, step)
    leads = trainer.mesh.rank == 0
    if leads:
        discard_unfinished(folder)
        beside.mkdir(parents=True)
    dist.barrier()
    dcp.save({}, checkpoint_id=beside, planner=_SavePlanner(piece for piece, first in pieces(trainer) if first))
    if leads:
        _write(beside / RECORD, _record(trainer, step))
        _rename(beside, path)
        for older in (other for other in _complete(folder) if read(other)["step"] == step and other != path):
            shutil.rmtree(older)
    dist.barrier()
    return path


def load(trainer: Trainer, path: str | Path) -> int:
    """Put a checkpoint's values into a trainer of any layout, schedule and dtype; how many steps it has had.

    To be called on every rank. Each reads the pieces that it holds, and no others; then the pieces of the parameters
    are gathered over ZeRO's groups. Raises ValueError where the checkpoint does not fit the model.
    """
    record = check(path, trainer.job.model)
    dcp.load({}, checkpoint_id=path, planner=_LoadPlanner(piece for piece, _ in pieces(trainer)))
    for shard in trainer.shards:
        shard.steps = record["step"]
        shard.piece.copy_(shard.master)
        all_gather_single(shard.full, shard.piece, group=shard.group)
    return record["step"]


def newest(folder: str | Path) -> Path:
    """The complete checkpoint of the most steps in `folder`; raises ValueError where there is none."""
    complete = _complete(Path(folder))
    if not complete:
        raise ValueError(f"there is no complete checkpoint in {folder}: name another folder, or leave out --resume")
    return complete[-1]


def check(path: str | Path, model: GPTConfig) -> dict:
    """What a checkpoint says of itself (`read`); raises ValueError, one line, where it is not one of this model."""
    record = read(path)
    saved, wanted = record["model"], _settings(model)
    wrong = [f"{name} {saved.get(name)}, not {value}" for name, value in wanted.items() if saved.get(name) != value]
    if wrong:
        raise ValueError(f"{path} is of a model with {', '.join(wrong)}: give the sizes that it was saved with")
    return record


def read(path: str | Path) -> dict:
    """The record of a checkpoint: `step`, the `layout` that saved it, and the settings of the `model`."""
    try:
        return json.loads((Path(path) / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint: its {RECORD} cannot be read ({error})") from None


def discard_unfinished(folder: str | Path) -> None:
    """Remove what a save that did not come to its end has left in `folder`."""
    for left in Path(folder).glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    """From the fewest steps to the most."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]+(\.[0-9]+)?", path.name)]
    return sorted(found, key=lambda path: [int(number) for number in path.name[5:].split(".")])


def _free_name(folder: Path, step: int) -> Path:
    """A second checkpoint of a step gets another name, so that the first is there until the second is."""
    names = [f"step-{step:08d}", *(f"step-{step:08d}.{again}" for again in range(1, 10_000))]
    return next(folder / name for name in names if not (folder / name).exists())


def _settings(model: GPTConfig) -> dict:
    return {name: value for name, value in asdict(model).items() if name not in FREE}


def _record(trainer: Trainer, step: int) -> dict:
    return {"step": step, "layout": str(trainer.job.layout), "model": _settings(trainer.job.model)}


def _write(path: Path, record: dict) -> None:
    with path.open("w") as out:
        json.dump(record, out, indent=2)
        out.flush()
        os.fsync(out.fileno())


def _rename(source: Path, target: Path) -> None:
    """After which the new name is on the disk, and not in the system's memory alone."""
    os.replace(source, target)
    parent = os.open(target.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Writes pieces, each at its place. That they fill every tensor once is checked before anything is written."""

    def __init__(self, mine: Iterable[Piece]):
        super().__init__(flatten_state_dict=False)
        self.mine = {_index(piece): piece for piece in mine}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(piece) for piece in self.mine.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.mine[write_item.index].tensor


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads pieces, each from whatever pieces it was saved in."""

    def __init__(self, mine: Iterable[Piece]):
        super().__init__(flatten_state_dict=False)
        self.mine = {_index(piece): piece for piece in mine}

    def create_local_plan(self) -> LoadPlan:
        saved, items = self.metadata.state_dict_metadata, []
        for piece in self.mine.values():
            items += create_read_items_for_chunk_list(piece.name, saved[piece.name], [_chunk(piece)])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.mine[read_item.dest_index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, torch.Size(piece.offset))


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.shape)


def _write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    data = TensorWriteData(_chunk(piece), properties, torch.Size(piece.whole))
    return WriteItem(_index(piece), WriteItemType.SHARD, tensor_data=data)

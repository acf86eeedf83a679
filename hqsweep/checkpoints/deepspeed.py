"""Adam's moments in the checkpoints of DeepSpeed's ZeRO, stages 1 to 3, by data-parallel ranks.

The file `latest` names a folder with one file for each rank, *zero_pp_rank_R_mp_rank_00_optim_states.pt. There each
group of parameters is one flat tensor. In stages 1 and 2 a rank has a range of it; param_slice_mappings says where each
parameter lies in that range. In stage 3 a rank has the R-th part of every parameter, rounded up, in the order of
param_shapes. The model's files have param_shapes (deepspeed/checkpoint/ds_to_universal.py reads them alike). torch's
weights_only unpickler reads the files; every class of deepspeed is replaced by one that keeps its arguments and does
nothing.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hqsweep.errors import UserError
from hqsweep.recipe.roles import clean_name

LATEST = "latest"
NAME = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
STATES = ("exp_avg", "exp_avg_sq")


class Inert:
    """The substitute of deepspeed's objects."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def is_part(path: Path) -> bool:
    """Whether it is the file of one rank."""
    return NAME.fullmatch(path.name) is not None


def state_files(folder: Path) -> tuple[tuple[Path, ...], str | None]:
    """The files of all ranks in their order; or no files, and why they are not read."""
    tag = (folder / LATEST).read_text(errors="replace").strip()
    if not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        return (), f"the folder that {LATEST} names is not there"
    inside = folder / tag
    matches = {match: path for path in inside.iterdir() if (match := NAME.fullmatch(path.name))}
    if any(path.name.startswith("expp_rank") for path in inside.iterdir()) or any(int(m[2]) for m in matches):
        return (), "its ranks share tensors or experts, and not data alone"
    ranks = {int(match[1]): path for match, path in matches.items()}
    if not ranks or set(ranks) != set(range(len(ranks))):
        return (), f"files of ranks are missing in {tag}"
    return tuple(ranks[rank] for rank in sorted(ranks)), None


def read_moments(files: Sequence[Path], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, Any]]:
    """Clean name of a parameter -> its "step", "exp_avg" and "exp_avg_sq", in the shape that `shapes` gives it.
    UserError for files in another layout, or from fewer ranks than wrote them."""
    import torch

    states = [_state(file) for file in files]
    parts: dict[str, dict[str, list[Any]]] = {}
    steps: dict[str, Any] = {}
    for rank, (file, state) in enumerate(zip(files, states, strict=True)):
        for flat, places in _checked_groups(file, state, rank, len(files)):
            for name, start, length in places:
                for key in STATES:
                    part = flat[key].flatten()[start : start + length]
                    parts.setdefault(clean_name(name), {}).setdefault(key, []).append(part)
                steps[clean_name(name)] = flat.get("step")
    moments = {}
    for name, pieces_by_key in parts.items():
        whole = {key: torch.cat(pieces) for key, pieces in pieces_by_key.items()}
        if name in shapes and whole[STATES[0]].numel() == math.prod(shapes[name]):
            whole = {key: value.reshape(shapes[name]) for key, value in whole.items()}
        moments[name] = {"step": steps[name], **whole}
    return moments


Place = tuple[str, int, int]
"""The name of a parameter, the first index of its part in a flat tensor, and the part's length."""


Group = tuple[Mapping[str, Any], list[Place]]
"""The flat tensors of a group of parameters, and the places in them."""


def _checked_groups(file: Path, state: Mapping[str, Any], rank: int, files: int) -> list[Group]:
    """Return the groups of a rank. UserError for another layout, another number of ranks, or another optimizer."""
    try:
        count, groups = _groups(file, state, rank)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UserError(
            f"{file}: its layout is not that of ZeRO's stages 1 to 3 ({type(error).__name__}: {error}); load the"
            " weights alone"
        ) from None
    if count != files:
        raise UserError(f"{file}: {count} ranks have written the optimizer's state, and {files} files are there")
    for flat, _ in groups:
        if not all(key in flat for key in STATES):
            raise UserError(
                f"{file}: the optimizer's state holds {', '.join(map(str, flat))}, which is not Adam's; load the"
                " weights alone"
            )
    return groups


def _groups(file: Path, state: Mapping[str, Any], rank: int) -> tuple[int, list[Group]]:
    """The number of ranks that share each group, and the group's flat tensors, each with the places in it."""
    if "param_slice_mappings" in state:
        flats = state["base_optimizer_state"]["state"]
        mappings = [
            [(name, at.start, at.numel) for name, at in mapping.items()] for mapping in state["param_slice_mappings"]
        ]
        counts = state["partition_count"]
        count = counts if isinstance(counts, int) else max(counts)
        return count, [(flats[index], places) for index, places in enumerate(mappings)]
    flats, count = state["optimizer_state_dict"]["state"], state["partition_count"]
    shapes = _load(file.with_name(file.name.removeprefix("bf16_").replace("optim_states", "model_states")))
    groups = []
    for index, group in enumerate(shapes["param_shapes"]):
        places, start = [], 0
        for name, shape in group.items():
            numel = math.prod(shape)
            own = -(-numel // count)
            places.append((name, start, max(0, min(own, numel - rank * own))))
            start += own
        groups.append((flats[index], places))
    return count, groups


def _state(file: Path) -> Mapping[str, Any]:
    state = _load(file).get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise UserError(f"{file}: it holds no state of an optimizer; load the weights alone")
    return state


def _load(file: Path) -> Mapping[str, Any]:
    from torch import serialization

    from hqsweep.checkpoints import torch_file

    try:
        names = serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # which reading it will explain
        names = []
    with serialization.safe_globals([(Inert, name) for name in names if name.startswith("deepspeed.")]):
        document = torch_file.read_file(file)
    return document if isinstance(document, Mapping) else {}

"""Converts between the state of subgroups and the state per parameter in state dicts of
torch's optimizer."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch

from ebbtide.interleave.engine.commits import check_digest
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.params.local_shards import (
    flat_like,
    local_shard,
    own_rank,
    parts_of,
    unflatten,
    wrap_blocks,
    wrap_shard,
)
from ebbtide.interleave.engine.rules.rule import (
    MASTER_NAME,
    GroupRules,
    ScaledMoments,
    UpdateRule,
)
from ebbtide.interleave.engine.runtime.layout import (
    MASTER,
    param_rows,
    segment_rows,
    state_elements,
    state_rows,
    state_shape,
)
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates

log = logging.getLogger("ebbtide")

# Explicit, so that the defaults of torch that a job sets have no effect.
_HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}

# The key of a state dict that tells whether something is missing.
RECORD = "ebbtide"

# The number of shards of a parameter whose moments have scales: each has blocks of its
# own.
_PARTS = "parts"

# The state of a parameter in host memory: the rows of `UpdateRule.saved`, flat, in the
# order of its memory.
ParamState = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class SavedStates:
    """The states, and numbers of updates, of parameters that a state dict has or that
    the optimizer has updated.

    A state is None for a parameter that was not updated yet; there are none for a
    commit, which has them in storage.
    """

    params: list[torch.Tensor]
    states: list[ParamState | None] | None
    steps: list[int]


def gather_states(
    rules: Sequence[UpdateRule],
    states: SubgroupStates,
    values: Sequence[torch.Tensor],
    changed: Collection[int] = (),
    loaded: Mapping[int, torch.Tensor | None] = MappingProxyType({}),
) -> list[ParamState]:
    """Return the state of each parameter in new host memory. The other part of masters
    is the parameter, or the one that was `loaded` if no step has used it yet; masters
    of `changed` parameters become the parameter."""
    param_states = [
        rule.saved.zero_rows(value.numel())
        for value, rule in zip(values, rules, strict=True)
    ]
    for number, subgroup in enumerate(states.subgroups):
        segments = subgroup.segments
        targets = [
            list(param_rows(param_states[part.param], subgroup, part))
            for part in segments
        ]
        masters, split = [rows[MASTER] for rows in targets], subgroup.rule.split
        if split is not None:
            for rows, master in zip(targets, masters, strict=True):
                rows[MASTER] = torch.empty(len(master), dtype=split.dtype, device="cpu")
        # Straight to the memory that is returned, without another copy.
        states.copy_parts(number, list(zip(segments, targets, strict=True)))
        if split is not None:
            for part, rows, master in zip(segments, targets, masters, strict=True):
                rounded = loaded.get(part.param)
                param = values[part.param] if rounded is None else rounded
                param = param[part.begin : part.end].cpu()
                is_old = part.param in changed and rounded is None
                master.copy_(
                    param.float() if is_old else split.join(param, rows[MASTER])
                )
    return param_states


def scatter_states(
    states: SubgroupStates,
    values: Sequence[torch.Tensor],
    param_states: Sequence[ParamState | None],
) -> None:
    """Set the state of every parameter (flat). Masters need not round to the
    parameters: see `update_masters`.

    A state is None before the first update: the master is the parameter, the moments
    are 0."""
    # One buffer for all: a new one for each would exist beside the buffer of the
    # subgroup before.
    sizes = list(map(state_elements, states.subgroups))
    buffer = torch.empty(max(sizes, default=0), **_HOST)
    for number, subgroup in enumerate(states.subgroups):
        state = buffer[: sizes[number]].zero_().view(state_shape(subgroup))
        rows, split = state_rows(state, subgroup), subgroup.rule.split
        for segment in subgroup.segments:
            param_state, elements = (
                param_states[segment.param],
                slice(segment.begin, segment.end),
            )
            if param_state is None:
                if not subgroup.rule.reads_params:
                    rows[MASTER][segment.span] = values[segment.param][elements]
                continue
            sources = param_rows(param_state, subgroup, segment)
            if split is not None:
                sources = (split.split(sources[MASTER])[1], *sources[1:])
            for row, source in zip(
                segment_rows(rows, subgroup, segment), sources, strict=True
            ):
                row.copy_(source)
        states.write(number, state)


def convert_state(
    state: ParamState, own: UpdateRule, rule: UpdateRule, value: torch.Tensor
) -> ParamState:
    """Return a state, with masters or without, for the rule of a parameter whose dtype
    has changed."""
    if own.has_masters == rule.has_masters:
        return state
    return (value.float().cpu(), *state) if rule.has_masters else state[1:]


def rounded_masters(rule: UpdateRule, state: ParamState) -> torch.Tensor | None:
    """Return the parameter that the other part of masters is for.

    Return None for masters in one part.
    """
    return None if rule.split is None else rule.split.split(state[MASTER])[0]


def update_masters(
    states: SubgroupStates,
    values: Sequence[torch.Tensor],
    changed: Collection[int],
    loaded: Mapping[int, torch.Tensor | None],
) -> set[int]:
    """Set the masters of changed parameters to their values.

    Masters that already round to these values are kept. Return the parameters with a
    master that was not kept. Parts of masters become 0, since nobody knows which
    elements were written, unless they were loaded: then parts whose master rounds to
    the parameter, to even or away from zero, stay, and the parameter becomes the
    latter.
    """
    replaced: set[int] = set()
    for number, subgroup in enumerate(states.subgroups):
        segments = [
            segment for segment in subgroup.segments if segment.param in changed
        ]
        if not segments or not subgroup.rule.has_masters:
            continue
        split = subgroup.rule.split
        with states.edited_masters(
            number, [segment.span for segment in segments]
        ) as masters:
            for segment, master in zip(segments, masters, strict=True):
                param = values[segment.param][segment.begin : segment.end]
                value = param.cpu()
                if split is not None:
                    rounded = loaded.get(segment.param)
                    rounded = (
                        value
                        if rounded is None
                        else rounded[segment.begin : segment.end]
                    )
                    to_even = split.join(rounded, master).to(value.dtype)
                    different = ((rounded != value) & (to_even != value)) | (
                        segment.param not in loaded
                    )
                    master[different] = 0
                    param.copy_(torch.where(different, value, rounded))
                else:
                    different = master.to(value.dtype) != value
                    master[different] = value[different].float()
                if different.any():
                    replaced.add(segment.param)
    return replaced


def describe(rule: UpdateRule, param: torch.Tensor) -> str:
    """Return what the state of a parameter depends on: its rule, type and shape, and
    its part on this rank."""
    shard = local_shard(param)
    part = "" if shard.shape == param.shape else f", {tuple(shard.shape)} of it here"
    return (
        f"{rule.name} with master: {rule.master}, {shard.dtype} "
        f"{tuple(param.shape)}{part}"
    )


def check_commit(commit: Any, own: Mapping[str, Any]) -> None:
    """Raise EngineError if a commit is not of the same parameters, numbers of updates
    and rank as this optimizer."""
    check_digest(commit)
    for key, value in own.items():
        saved = commit.get(key, value)
        if saved != value:
            raise EngineError(
                f"the commit has other {key} than what is loaded with it "
                f"({_difference(saved, value)}): load what "
                "commit() has returned, on the same rank of the same job"
            )


def _difference(saved: Any, own: Any) -> str:
    if not isinstance(saved, list) or not isinstance(own, list):
        return f"{saved} and {own}"
    pairs = list(zip_longest(saved, own, fillvalue="none"))
    number = next(number for number, (one, other) in enumerate(pairs) if one != other)
    return f"number {number}: {pairs[number][0]} and {pairs[number][1]}"


def make_record(state_dict: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return what tells whether an optimizer's state dict lacks something.

    The optimizer is this one.
    """
    return {
        "keys": sorted(state_dict),
        "params": sorted(state_dict["state"]),
        "rank": rank,
    }


def _check_record(state_dict: Mapping[str, Any], is_sharded: bool) -> bool:
    """Return whether a state dict is one of this optimizer. Raises EngineError if it is
    and lacks something."""
    record = state_dict.get(RECORD)
    if record is None:
        return False
    try:
        missing = [key for key in record["keys"] if key not in state_dict]
        missing += [
            f"the state of parameter {name}"
            for name in record["params"]
            if name not in state_dict["state"]
        ]
        rank = record["rank"]
    except (KeyError, TypeError):
        raise EngineError(
            f"{RECORD} of this state dict is not what state_dict() has returned: load "
            "it as it was"
        ) from None
    if missing:
        raise EngineError(
            f"the state dict lacks {missing[0]}, which it had when it was made: load "
            "all of it"
        )
    if is_sharded and rank != own_rank():
        raise EngineError(
            f"this is the state dict of rank {rank}, and this is rank {own_rank()}: "
            "load its own here"
        )
    return True


def make_entry(
    rule: UpdateRule, param: torch.Tensor, state: ParamState, step: int
) -> dict[str, Any]:
    """Return the entry of a parameter, perhaps a DTensor, in a state dict: the rule's
    entry, and the fp32 master."""
    # bitsandbytes casts a tensor to the type of the parameter, which not all numbers of
    # steps fit in.
    entry: dict[str, Any] = {
        "step": step if rule.scales else torch.tensor(float(step), **_HOST)
    }
    for name, row in zip(rule.saved.row_names, state, strict=True):
        entry[name] = (
            wrap_blocks(param, row)
            if name in rule.scales
            else wrap_shard(param, unflatten(row, param))
        )
    if rule.scales and parts_of(param) > 1:
        entry[_PARTS] = parts_of(param)
    constants = {} if rule.scaled is None else rule.scaled.constants
    return entry | {
        name: torch.from_numpy(values.copy()) for name, values in constants.items()
    }


def read_state_dict(
    rules: GroupRules,
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    updated_params: Collection[torch.Tensor],
    check: Callable[[Sequence[torch.Tensor]], None],
) -> SavedStates:
    """Read a state dict of this optimizer or of its rule's, or a commit.

    Nothing is changed. Raises EngineError for other rules or models, if something is
    missing, and as `check` for the parameters: those that the state dict has or that
    are in `updated_params`.
    """
    name_of, saved = _saved_names(rules, state_dict, param_groups)
    is_own = _check_record(
        state_dict, any(hasattr(param, "to_local") for param in name_of)
    )
    rule_of = rules.by_param(param_groups)
    # Parameters that are frozen now may have been updated before.
    params = [
        param
        for param, name in name_of.items()
        if param in updated_params or name in saved
    ]
    if "storage" in state_dict:
        return SavedStates(
            params,
            None,
            [_commit_step(rule_of[param], saved, name_of[param]) for param in params],
        )
    check(params)
    states: list[ParamState | None] = []
    steps = []
    for param in params:
        entry, source = (
            saved.get(name_of[param]),
            f"state of parameter {name_of[param]}",
        )
        state, step = (
            parse_entry(rule_of[param], param, entry, source, is_own)
            if entry is not None
            else (None, 0)
        )
        states.append(state)
        steps.append(step)
    missing = [
        name_of[param]
        for param, state in zip(params, states, strict=True)
        if state is None
    ]
    if missing and saved and not is_own:
        log.warning(
            "ebbtide: the state dict has no state of %d of %d parameters (the first "
            "is number %s): they begin anew",
            len(missing),
            len(params),
            missing[0],
        )
    return SavedStates(params, states, steps)


def _saved_names(
    rules: GroupRules,
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
) -> tuple[dict[torch.Tensor, Any], dict[Any, Any]]:
    """Return the name of each parameter in a state dict, and its states by name."""
    groups, saved = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(saved, dict):
        raise EngineError(
            "this is not the state dict of an optimizer: it has no param_groups or no "
            "state"
        )
    if not all(
        isinstance(group, dict) and isinstance(group.get("params"), list)
        for group in groups
    ):
        raise EngineError(
            "this is not the state dict of an optimizer: its param_groups have no "
            "params"
        )
    saved_sizes = [len(group["params"]) for group in groups]
    own_sizes = [len(group["params"]) for group in param_groups]
    if saved_sizes != own_sizes:
        raise EngineError(
            f"this is the state dict of another model: its groups have {saved_sizes} "
            "parameters, those of this "
            f"optimizer {own_sizes}"
        )
    for number, (group, own_group) in enumerate(zip(groups, param_groups, strict=True)):
        own, saved_rule = rules.rule_of(own_group).name, group.get("rule")
        if saved_rule not in (None, own):
            raise EngineError(
                f"group {number} of the state dict has the rule {saved_rule}, that of "
                f"this optimizer {own}"
            )
        missing = rules.rule_of(own_group).defaults.keys() - group.keys()
        if missing and RECORD in state_dict:
            raise EngineError(
                f"group {number} of the state dict lacks {min(missing)}, which it had: "
                "load all of it"
            )
        rules.checked({**own_group, **group})
    saved_names = [name for group in groups for name in group["params"]]
    if others := saved.keys() - set(saved_names):
        raise EngineError(
            f"the state dict has the state of parameter {min(others, key=str)}, and no "
            "group has that"
        )
    own_params = [param for group in param_groups for param in group["params"]]
    return dict(zip(own_params, saved_names, strict=True)), saved


def _with_codes(
    rule: UpdateRule,
    scaled: ScaledMoments,
    param: torch.Tensor,
    entry: Mapping[str, Any],
    source: str,
    is_own: bool,
) -> dict[str, Any]:
    """Return an entry of 8-bit moments as `make_entry` does.

    Entries of bitsandbytes may be nested, or in fp32.
    """
    whole = {
        **entry,
        **{
            name: row
            for part in entry.values()
            if isinstance(part, Mapping)
            for name, row in part.items()
        },
    }
    for number, (name, scales) in enumerate(
        zip(rule.moments, scaled.names, strict=True)
    ):
        moment = whole.get(name)
        if (
            isinstance(moment, torch.Tensor)
            and moment.is_floating_point()
            and not is_own
        ):
            # bitsandbytes has fp32 moments for small parameters.
            values = local_shard(moment).detach().float().cpu().reshape(-1).numpy()
            codes, largest = scaled.quantize(values, number)
            whole |= {
                name: torch.from_numpy(codes).view(local_shard(moment).shape),
                scales: torch.from_numpy(largest),
            }
    if (parts := whole.get(_PARTS, 1)) != parts_of(param):
        raise EngineError(
            f"{source} has {parts} shards, the parameter {parts_of(param)}: load it "
            "with as many ranks"
        )
    for name, values in scaled.constants.items():
        own, expected = whole.get(name), torch.from_numpy(values)
        if own is not None and not _is_close(own, expected):
            raise EngineError(
                f"{source}: {name} is not the data type of {rule.title}, `dynamic`"
            )
    return whole


def _commit_step(rule: UpdateRule, saved: Mapping[Any, Any], name: Any) -> int:
    """Return the number of updates of a parameter in a commit."""
    source = f"state of parameter {name}"
    entry = saved.get(name)
    if entry is None:
        return 0
    if not isinstance(entry, Mapping):
        raise EngineError(
            f"{source} is {type(entry).__name__}: load what commit() has returned"
        )
    return _parse_step(rule, entry, f"{source}: step", True)


def _is_close(own: Any, expected: torch.Tensor) -> bool:
    is_alike = (
        isinstance(own, torch.Tensor)
        and own.shape == expected.shape
        and own.dtype == expected.dtype
    )
    return is_alike and torch.allclose(own.cpu(), expected, 1e-5, 0)


def _local_row(
    param: torch.Tensor, value: torch.Tensor, source: str, scales: int | None
) -> torch.Tensor:
    """Return this rank's part of a row of a parameter's state, flat.

    `scales` is the number of scales that it has; None: an element for each of the
    parameter.
    """
    if scales is None and _placement(value) not in (None, _placement(param)):
        raise EngineError(
            f"{source} is sharded in another way than the parameter: load "
            "it with as many ranks"
        )
    value = local_shard(value)
    # Scales of a shard may have a few zeros more: see `wrap_blocks`.
    value = value if scales is None else value[:scales]
    shape = local_shard(param).shape
    if value.shape != (shape if scales is None else (scales,)):
        shapes = f"{tuple(value.shape)}, the parameter is {tuple(shape)}"
        raise EngineError(
            f"{source} is {shapes}: this is the state dict of another model"
        )
    return value if scales is not None else flat_like(value, param)


def parse_entry(
    rule: UpdateRule,
    param: torch.Tensor,
    entry: Mapping[str, Any],
    source: str,
    is_own: bool,
) -> tuple[ParamState, int]:
    """Return the state and the step in an entry. Without a master, as torch writes it,
    the master is the parameter; `is_own`: it is of this optimizer, and has one."""
    other = f"this is not a state dict of {rule.title}"
    if not isinstance(entry, Mapping):
        raise EngineError(f"{source} is {type(entry).__name__}: {other}")
    if "max_exp_avg_sq" in entry:
        raise EngineError(
            f"{source} is of AMSGrad, which this optimizer does not support"
        )
    if rule.scaled is not None:
        entry = _with_codes(rule, rule.scaled, param, entry, source, is_own)
    rows = []
    saved = rule.saved
    count = local_shard(param).numel()
    lengths = [part.stop for part in saved.row_slices(0, count, 0)]
    for name, dtype, length in zip(saved.row_names, saved.dtypes, lengths, strict=True):
        value = entry.get(name)
        if value is None and name == MASTER_NAME and not is_own:
            value = param.detach()
        if not isinstance(value, torch.Tensor):
            raise EngineError(f"{source} has no {name} that is a tensor: {other}")
        if value.is_floating_point() != dtype.is_floating_point:
            raise EngineError(
                f"{source}: {name} is {value.dtype}, and must be {dtype}: {other}"
            )
        is_scale = name in rule.scales
        row = _local_row(
            param, value, f"{source}: {name}", length if is_scale else None
        )
        rows.append(row.to(dtype=dtype, device="cpu"))
    return tuple(rows), _parse_step(rule, entry, f"{source}: step", is_own)


def _placement(tensor: torch.Tensor) -> Any:
    """Return the whole shape of a DTensor and its division over ranks.

    Return None for other tensors.
    """
    return (
        (tuple(tensor.shape), tensor.placements)
        if hasattr(tensor, "to_local")
        else None
    )


def _parse_step(
    rule: UpdateRule, entry: Mapping[str, Any], source: str, is_own: bool
) -> int:
    """Return the number of updates in an entry. Entries of rules that do not use it, as
    torch writes them, may have none."""
    if (
        "step" not in entry
        and not is_own
        and rule.factors(rule.defaults, 2) == rule.factors(rule.defaults, 3)
    ):
        return 1
    try:
        step = float(entry["step"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise EngineError(
            f"{source} is not a number: this is not a state dict of {rule.title}"
        ) from None
    if not (step >= 1 and step.is_integer()):
        raise EngineError(f"{source} is {step:g}: it must be a whole number from 1 on")
    return int(step)

"""Which parameters are updated together: those of an FSDP module or of several, or buckets of neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import nn

from ...devices import has_streams
from ...optimizer import Optimizer
from ...optimizer.build import spec_of
from ...optimizer.parameters import iter_params, params_of
from ...placement import is_distributed
from ...placement.combinations import FSDP2, kind_of


@dataclass(eq=False)
class Group:
    """Parameters that one update takes."""

    index: int  # its place among the groups, in the order in which backward completes them
    name: str  # how messages call it
    params: list[torch.Tensor]  # the parameters
    modules: tuple[nn.Module, ...]  # the FSDP modules that gather them, if any do
    spans_tensors: bool  # whether their rule reduces over all of them
    in_model: InitVar[Set[int]]  # the parameters of the model, by `id`

    def __post_init__(self, in_model: Set[int]) -> None:
        meshes = [param.device_mesh for param in self.params if is_distributed(param)]  # type: ignore[attr-defined]
        self.is_copied_to_host = any(has_streams(torch.device(mesh.device_type)) for mesh in meshes)
        """Whether FSDP2 may leave gradients on their way from a GPU to the host."""
        self.is_guarded = all(id(param) in in_model for param in self.params)
        """Whether looking a parameter up in the model can wait for its update."""


MOST_JOINED = 512 * 2**20  # bytes on a rank of FSDP modules that are updated together


class Grouping:
    """All groups of an optimizer, which it follows: `divide` makes them, and joins neighbouring FSDP modules."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, bucket_bytes: int, *, joins: bool = False) -> None:
        self._bucket_bytes, self._joins = bucket_bytes, joins
        self.divide(optimizer, model)

    def divide(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Divide the parameters that the optimizer has now."""
        self.groups = _divided(optimizer, model, self._bucket_bytes, self._joins)
        self.of = {id(param): group for group in self.groups for param in group.params}
        self.of_module: dict[nn.Module, list[Group]] = {}
        """The groups that an FSDP module gathers parameters of."""
        for key, module in _gatherers(model).items():
            group, groups = self.of.get(key), self.of_module.setdefault(module, [])
            if group is not None and group not in groups:
                groups.append(group)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are the groups of the optimizer's parameters."""
        listed = list(map(id, params_of(optimizer)))
        return len(listed) == len(self.of) and all(key in self.of for key in listed)


def _divided(optimizer: Optimizer, model: nn.Module, bucket_bytes: int, joins: bool) -> list[Group]:
    """Divide an optimizer's parameters into groups."""
    # Parameters of rules that reduce over all tensors cannot be updated one without the others and are one group. Those
    # that FSDP2 shards go by the module that gathers them, or by several; a backward, which completes them one by one,
    # does not join them. The rest go by buckets in the reverse order of registration.
    own = {id(param): param for _, _, _, param in iter_params(optimizer)}
    by_rule = _by_global_rule(optimizer)
    together = {id(param) for params in by_rule.values() for param in params}
    divided: list[tuple[str, list[torch.Tensor], tuple[nn.Module, ...]]] = []
    by_module: dict[nn.Module | None, list[tuple[str, torch.Tensor]]] = {}
    names = {id(param): name for name, param in model.named_parameters()}
    gatherers = _gatherers(model)
    # Each once, in the reverse order of registration, by the FSDP module that gathers it.
    for name, param in reversed(list(model.named_parameters())):
        if id(param) in own and id(param) not in together:
            by_module.setdefault(gatherers.get(id(param)), []).append((name, param))
    for module, members in by_module.items():
        if module is None:
            divided.extend((name, params, ()) for name, params in _buckets(members, bucket_bytes))
        elif not joins:
            divided.append((_name_of(model, [module]), [param for _, param in members], (module,)))
    for joined in reversed(_joined(model, by_module)) if joins else ():
        params = [param for module in joined for _, param in by_module[module]]
        divided.append((_name_of(model, joined), params, tuple(joined)))
    divided.extend((f"all tensors of rule {rule}", params, ()) for rule, params in by_rule.items())
    outside = [param for key, param in own.items() if key not in names and key not in together]
    if outside:
        divided.append(("parameters outside of the model", outside, ()))
    spanning = list(by_rule.values())
    return [
        Group(index, *division, any(division[1] is params for params in spanning), names.keys())
        for index, division in enumerate(divided)
    ]


def _gatherers(model: nn.Module) -> dict[int, nn.Module]:
    """The FSDP module that gathers a parameter, by the parameter's `id`."""
    modules = [(name, module) for name, module in model.named_modules() if kind_of(module) == FSDP2]
    gatherers: dict[int, nn.Module] = {}
    for name, param in model.named_parameters():
        holders = [(prefix, module) for prefix, module in modules if not prefix or name.startswith(f"{prefix}.")]
        if holders:
            # Names of holders are prefixes of each other: the longest is the innermost.
            gatherers[id(param)] = max(holders, key=lambda holder: len(holder[0]))[1]
    return gatherers


def _by_global_rule(optimizer: Optimizer) -> dict[str, list[torch.Tensor]]:
    """The parameters of rules that reduce over all tensors, by the rule's name."""
    by_rule: dict[str, list[torch.Tensor]] = {}
    for label, _, group, param in iter_params(optimizer):
        rule = optimizer.rule_of(group)
        if not param.is_meta and spec_of(rule, group, param, label=label).program.global_reductions:
            by_rule.setdefault(rule.name, []).append(param)
    return by_rule


def _joined(model: nn.Module, members: Mapping[Any, Sequence[tuple[str, torch.Tensor]]]) -> list[list[nn.Module]]:
    """Join FSDP modules that are neighbours in the order of forward."""
    # A launch and an event for each of a hundred modules would take the host longer than their updates take a GPU. What
    # forward needs first stays alone. From then on a group has at most the bytes of all groups before it, so that it is
    # updated while these compute, and at most MOST_JOINED, which bounds the time that forward can wait for one.
    joined: list[list[nn.Module]] = []
    before = held = 0.0
    for module in model.modules():
        if module not in members:
            continue
        size = sum(_bytes_of(param) for _, param in members[module])
        if joined and held + size <= min(before, MOST_JOINED):
            joined[-1].append(module)
            held += size
        else:
            before += held
            joined.append([module])
            held = size
    return joined


def _name_of(model: nn.Module, modules: Sequence[nn.Module]) -> str:
    names = [name for name, candidate in model.named_modules() if candidate in modules]
    if len(names) > 1:
        return f"modules {names[0] or 'the root'} to {names[-1]}"
    return f"module {names[0]}" if names[0] else "the root module"


def _bytes_of(param: Any) -> float:
    """What a parameter takes on a rank; of one that is cut unevenly the mean, so that all ranks divide alike."""
    size = float(param.numel() * param.element_size())
    for dim, placement in enumerate(getattr(param, "placements", ())):
        size /= 1 if placement.is_replicate() else param.device_mesh.size(dim)
    return size


def _buckets(members: Sequence[tuple[str, torch.Tensor]], most: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Cut a list of parameters where so many bytes are together."""
    bucket: list[tuple[str, torch.Tensor]] = []
    held = 0.0
    for name, param in members:
        size = _bytes_of(param)
        if bucket and held + size > most:
            yield _titled(bucket)
            bucket, held = [], 0.0
        bucket.append((name, param))
        held += size
    if bucket:
        yield _titled(bucket)


def _titled(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[str, list[torch.Tensor]]:
    first, last = bucket[-1][0], bucket[0][0]
    return first if first == last else f"{first} to {last}", [param for _, param in bucket]

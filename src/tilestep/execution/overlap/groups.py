"""Groups of parameters that are updated together: the parameters of one or several FSDP modules, or buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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
    """Parameters that are updated together."""

    index: int  # the index of the group, in the order in which backward completes groups
    name: str  # its name in messages
    params: list[torch.Tensor]
    modules: Sequence[nn.Module]  # the FSDP modules that gather the parameters; empty without FSDP
    spans_tensors: bool  # whether the rule reduces over all parameters of the group
    in_model: InitVar[Set[int]]  # the `id`s of the model's parameters

    def __post_init__(self, in_model: Set[int]) -> None:
        meshes = [param.device_mesh for param in self.params if is_distributed(param)]  # type: ignore[attr-defined]
        self.is_copied_to_host = any(has_streams(torch.device(mesh.device_type)) for mesh in meshes)
        """Whether FSDP2 may return gradients while their copy from a GPU to the host still runs."""
        self.is_guarded = all(id(param) in in_model for param in self.params)
        """Whether all parameters belong to the model, so that their look-ups can wait for the update."""


MOST_JOINED = 512 * 2**20  # the most bytes per rank of joined FSDP modules


class Grouping:
    """The groups of an optimizer; `divide` makes them again when the optimizer's parameters change."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, bucket_bytes: int, *, joins: bool = False) -> None:
        self.model, self._bucket_bytes, self._joins = model, bucket_bytes, joins
        self.divide(optimizer)

    def divide(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's current parameters into groups."""
        # The parameters of a rule that reduces over all tensors must be updated together: they are a single group.
        # Parameters that FSDP2 shards are grouped by the module that gathers them. Only "forward" joins several such
        # modules; backward completes them one by one. All other parameters are grouped in buckets, in the reverse
        # order of registration.
        model, own = self.model, dict[int, torch.Tensor]()
        by_rule: dict[str, list[torch.Tensor]] = {}
        for label, _, group, param in iter_params(optimizer):
            own[id(param)], rule = param, optimizer.rule_of(group)
            if not param.is_meta and spec_of(rule, group, param, label=label).program.global_reductions:
                by_rule.setdefault(rule.name, []).append(param)
        together = {id(param) for params in by_rule.values() for param in params}
        named, gatherers = list(model.named_parameters()), _gatherers(model)
        in_model = {id(param): place for place, (_, param) in enumerate(named)}
        # Each parameter once, in the reverse order of registration, by the FSDP module that gathers it.
        by_module: dict[nn.Module, list[tuple[str, torch.Tensor]]] = {}
        loose: list[tuple[str, torch.Tensor]] = []
        for name, param in reversed(named):
            if id(param) in own and id(param) not in together:
                module = gatherers.get(id(param))
                (loose if module is None else by_module.setdefault(module, [])).append((name, param))
        found: list[tuple[str, list[torch.Tensor], Sequence[nn.Module], bool]] = []
        for bucket in _buckets(loose, self._bucket_bytes):
            first, last = bucket[-1][0], bucket[0][0]
            found.append((first if first == last else f"{first} to {last}", [param for _, param in bucket], (), False))
        for joined in _joined(model, by_module) if self._joins else [[module] for module in by_module]:
            names = [name for name, candidate in model.named_modules() if candidate in joined]
            title = f"module {names[0]}" if names[0] else "the root module"
            if len(names) > 1:
                title = f"modules {names[0] or 'the root'} to {names[-1]}"
            found.append((title, [param for module in joined for _, param in by_module[module]], joined, False))
        found += [(f"all tensors of rule {name}", params, (), True) for name, params in by_rule.items()]
        if outside := [param for key, param in own.items() if key not in in_model and key not in together]:
            found.append(("parameters outside the model", outside, (), False))
        # Backward completes a group with the gradient of the parameter that was registered first.
        found.sort(key=lambda one: min(in_model.get(id(param), -1) for param in one[1]), reverse=True)
        self.groups = [Group(index, *one, in_model.keys()) for index, one in enumerate(found)]
        self.of = {id(param): group for group in self.groups for param in group.params}
        self.of_module: dict[nn.Module, list[Group]] = {}
        """For each FSDP module the groups whose parameters it gathers."""
        for key, module in gatherers.items():
            own_group, groups = self.of.get(key), self.of_module.setdefault(module, [])
            if own_group is not None and own_group not in groups:
                groups.append(own_group)

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the groups hold exactly the optimizer's current parameters."""
        listed = list(map(id, params_of(optimizer)))
        return len(listed) == len(self.of) and all(key in self.of for key in listed)


def _gatherers(model: nn.Module) -> dict[int, nn.Module]:
    """By `id` of a parameter, the FSDP module that gathers it."""
    modules = [(name, module) for name, module in model.named_modules() if kind_of(module) == FSDP2]
    gatherers: dict[int, nn.Module] = {}
    for name, param in model.named_parameters():
        holders = [(prefix, module) for prefix, module in modules if not prefix or name.startswith(f"{prefix}.")]
        if holders:
            # The names are prefixes of each other: the longest name is the innermost module.
            gatherers[id(param)] = max(holders, key=lambda holder: len(holder[0]))[1]
    return gatherers


def _joined(model: nn.Module, members: Mapping[Any, Sequence[tuple[str, torch.Tensor]]]) -> list[list[nn.Module]]:
    """Join FSDP modules that are consecutive in forward."""
    # With a launch and an event for each of a hundred modules, the host would take longer than the updates on a GPU.
    # The first module stays alone, since forward needs it first. A later group has at most the bytes of all groups
    # before it, so that it is updated while these compute, and at most MOST_JOINED bytes, which bounds forward's wait.
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


def _bytes_of(param: Any) -> float:
    """The bytes of a parameter per rank; the mean for uneven shards, so that all ranks make the same groups."""
    size = float(param.numel() * param.element_size())
    for dim, placement in enumerate(getattr(param, "placements", ())):
        size /= 1 if placement.is_replicate() else param.device_mesh.size(dim)
    return size


def _buckets(members: Sequence[tuple[str, torch.Tensor]], most: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Cut a list of parameters into buckets of at most `most` bytes."""
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    held = 0.0
    for name, param in members:
        size = _bytes_of(param)
        if not buckets or held + size > most:
            buckets.append([])
            held = 0.0
        buckets[-1].append((name, param))
        held += size
    return buckets

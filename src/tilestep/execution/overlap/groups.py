"""Which parameters are updated together: those of an FSDP module or of several, or buckets of neighbours."""

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
    """Parameters that one update takes."""

    index: int  # its place among the groups, in the order in which backward completes them
    name: str  # how messages call it
    params: list[torch.Tensor]  # the parameters
    modules: Sequence[nn.Module]  # the FSDP modules that gather them, if any do
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
        self.model, self._bucket_bytes, self._joins = model, bucket_bytes, joins
        self.divide(optimizer)

    def divide(self, optimizer: Optimizer) -> None:
        """Divide the parameters that the optimizer has now."""
        # Parameters of rules that reduce over all tensors cannot be updated one without the others and are one group.
        # Those that FSDP2 shards go by the module that gathers them, or by several; a backward, which completes them
        # one by one, does not join them. The rest go by buckets in the reverse order of registration.
        model, own = self.model, dict[int, torch.Tensor]()
        by_rule: dict[str, list[torch.Tensor]] = {}
        for label, _, group, param in iter_params(optimizer):
            own[id(param)], rule = param, optimizer.rule_of(group)
            if not param.is_meta and spec_of(rule, group, param, label=label).program.global_reductions:
                by_rule.setdefault(rule.name, []).append(param)
        together = {id(param) for params in by_rule.values() for param in params}
        named, gatherers = list(model.named_parameters()), _gatherers(model)
        in_model = {id(param): place for place, (_, param) in enumerate(named)}
        # Each once, in the reverse order of registration, by the FSDP module that gathers it.
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
            found.append(("parameters outside of the model", outside, (), False))
        # Backward completes a group with the gradient of the parameter that was registered first.
        found.sort(key=lambda one: min(in_model.get(id(param), -1) for param in one[1]), reverse=True)
        self.groups = [Group(index, *one, in_model.keys()) for index, one in enumerate(found)]
        self.of = {id(param): group for group in self.groups for param in group.params}
        self.of_module: dict[nn.Module, list[Group]] = {}
        """The groups that an FSDP module gathers parameters of."""
        for key, module in gatherers.items():
            own_group, groups = self.of.get(key), self.of_module.setdefault(module, [])
            if own_group is not None and own_group not in groups:
                groups.append(own_group)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are the groups of the optimizer's parameters."""
        listed = list(map(id, params_of(optimizer)))
        return len(listed) == len(self.of) and all(key in self.of for key in listed)


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


def _bytes_of(param: Any) -> float:
    """What a parameter takes on a rank; of one that is cut unevenly the mean, so that all ranks divide alike."""
    size = float(param.numel() * param.element_size())
    for dim, placement in enumerate(getattr(param, "placements", ())):
        size /= 1 if placement.is_replicate() else param.device_mesh.size(dim)
    return size


def _buckets(members: Sequence[tuple[str, torch.Tensor]], most: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Cut a list of parameters where so many bytes are together."""
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

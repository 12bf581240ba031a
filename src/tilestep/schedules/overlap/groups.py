"""Which parameters are updated together: an FSDP module's own, or buckets of neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...compat import fsdp_module_type, local_parts
from ...devices import has_streams
from ...optimizer import Optimizer
from ...optimizer.build import spec_of
from ...optimizer.parameters import iter_params


@dataclass(eq=False)
class Group:
    """Parameters that one update takes."""

    index: int  # its place among the groups, in the order in which backward completes them
    name: str  # how messages call it
    params: list[torch.Tensor]  # the parameters
    module: nn.Module | None = None  # the FSDP module that gathers them, if one does
    is_copied_to_host: bool = False  # whether FSDP2 may leave gradients on their way from a GPU to the host
    is_guarded: bool = True  # whether who looks a parameter up in the model can be made to wait for its update


class Grouping:
    """All groups of an optimizer, which it follows: `divide` makes them."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self.divide(optimizer, model)

    def divide(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Divide the parameters that the optimizer has now."""
        self.groups = _divided(optimizer, model, self._bucket_bytes)
        self.of = {id(param): group for group in self.groups for param in group.params}

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are the groups of the optimizer's parameters."""
        listed = [id(param) for group in optimizer.param_groups for param in group["params"]]
        return len(listed) == len(self.of) and all(key in self.of for key in listed)


def _divided(optimizer: Optimizer, model: nn.Module, bucket_bytes: int) -> list[Group]:
    """Divide an optimizer's parameters into groups."""
    # Parameters of rules that reduce over all tensors cannot be updated one without the others and are one group. Those
    # that FSDP2 shards go by the module that gathers them, the rest by buckets in the reverse order of registration.
    own = {id(param): (label, param) for label, _, _, param in iter_params(optimizer)}
    together = _together(optimizer)
    divided: list[tuple[str, list[torch.Tensor], nn.Module | None]] = []
    by_module: dict[nn.Module | None, list[tuple[str, torch.Tensor]]] = {}
    names = {id(param): name for name, param in model.named_parameters()}
    kind = fsdp_module_type()
    modules = [
        (name, module) for name, module in model.named_modules() if kind is not None and isinstance(module, kind)
    ]
    # Each once, in the reverse order of registration, by the FSDP module that gathers it.
    for name, param in reversed(list(model.named_parameters())):
        if id(param) in own and id(param) not in together:
            holders = [(prefix, module) for prefix, module in modules if not prefix or name.startswith(f"{prefix}.")]
            # Names of holders are prefixes of each other: the longest is the innermost.
            module = max(holders, key=lambda holder: len(holder[0]))[1] if holders else None
            by_module.setdefault(module, []).append((name, param))
    for module, members in by_module.items():
        if module is not None:
            name = next(name for name, candidate in model.named_modules() if candidate is module)
            divided.append((f"module {name}" if name else "the root module", [param for _, param in members], module))
        else:
            divided.extend((name, params, None) for name, params in _buckets(members, bucket_bytes))
    by_rule: dict[str, list[torch.Tensor]] = {}
    for key, rule in together.items():
        by_rule.setdefault(rule, []).append(own[key][1])
    divided.extend((f"all tensors of rule {rule}", params, None) for rule, params in by_rule.items())
    groups = [Group(index, name, params, module) for index, (name, params, module) in enumerate(divided)]
    outside = [param for key, (_, param) in own.items() if key not in names and key not in together]
    if outside:
        groups.append(Group(len(groups), "parameters outside of the model", outside, is_guarded=False))
    for group in groups:
        meshes = {id(mesh): mesh for param in group.params if (mesh := getattr(param, "device_mesh", None)) is not None}
        group.is_copied_to_host = any(has_streams(torch.device(mesh.device_type)) for mesh in meshes.values())
        group.is_guarded = all(id(param) in names for param in group.params)
    return groups


def _together(optimizer: Optimizer) -> dict[int, str]:
    """The parameters of rules that reduce over all tensors, with the rule's name."""
    rule_names: dict[int, str] = {}
    for _, _, group, param in iter_params(optimizer):
        if param.is_meta:
            continue
        rule = optimizer.rule_of(group)
        if spec_of(rule, group, param).program.global_reductions:
            rule_names[id(param)] = rule.name
    return rule_names


def _buckets(members: Sequence[tuple[str, torch.Tensor]], most: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Cut a list of parameters where so many bytes are together."""
    bucket: list[tuple[str, torch.Tensor]] = []
    held = 0
    for name, param in members:
        size = sum(part.numel() * part.element_size() for part in local_parts([param]))
        if bucket and held + size > most:
            yield _titled(bucket)
            bucket, held = [], 0
        bucket.append((name, param))
        held += size
    if bucket:
        yield _titled(bucket)


def _titled(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[str, list[torch.Tensor]]:
    first, last = bucket[-1][0], bucket[0][0]
    return first if first == last else f"{first} to {last}", [param for _, param in bucket]

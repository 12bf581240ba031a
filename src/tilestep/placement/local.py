"""DTensors: the local part of a parameter, its gradient and its state on this rank, and DTensors made of such parts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..compat import (
    PLAIN,
    distributed_like,
    distributed_tensor_type,
    dtensors_have_parts,
    layouts,
    local_parts,
    ready,
    with_part,
)
from ..errors import GradientError, StateError
from ..storage import shape_of_entries

if TYPE_CHECKING:
    from ..graph import Value
    from ..linalg.views import Cut


Over = tuple[int, int]  # a half-open range of dimensions


def is_distributed(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor."""
    if type(tensor) in PLAIN:
        return False
    kind = distributed_tensor_type()
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Any) -> Any:
    """The local part of a DTensor; other values unchanged."""
    return ready(local_parts([tensor])[0])


def checked_part(label: str, param: torch.Tensor) -> torch.Tensor:
    """The local part of a parameter; raises if it cannot be updated."""
    if not is_distributed(param):
        return param
    if any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
        raise GradientError(f"{label} is {_placed(param)}: a partial sum cannot be updated; redistribute it first")
    if param.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        raise GradientError(f"this rank does not belong to {param.device_mesh} of {label}")  # type: ignore[attr-defined]
    part = local_part(param)
    if type(part) not in PLAIN:
        raise GradientError(f"{label} is a DTensor of {type(part).__name__}; only plain local tensors are supported")
    dtype = getattr(param, "grad_dtype", param.dtype)
    if dtype != getattr(part, "grad_dtype", param.dtype):
        part.grad_dtype = dtype
    return part


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether every rank of a tensor's mesh has all of it; the same on all ranks."""
    if tensor.is_meta:
        # A meta tensor represents a parameter whose pieces are on several ranks.
        return False
    if not is_distributed(tensor):
        return True
    placed = enumerate(tensor.placements)  # type: ignore[attr-defined]
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return all(placement.is_replicate() or mesh.size(dim) == 1 for dim, placement in placed)


def spans_ranks(reduction: Value, cut: Mapping[int, int]) -> bool:
    """Whether a reduction includes a dimension along which its operand is cut."""
    gone, over = range(*(reduction.args[0].over or (0, 0))), reduction.over
    return any(dim not in gone and (over is None or dim in range(*over)) for dim in cut)


def sharded_dims(tensor: torch.Tensor) -> dict[int, int]:
    """The dimensions along which a DTensor is cut, each with the number of parts."""
    parts: dict[int, int] = {}
    if is_distributed(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        for place, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate() and mesh.size(place) > 1:
                dim = placement.dim % tensor.dim()
                parts[dim] = parts.get(dim, 1) * mesh.size(place)
    return parts


def _placed(tensor: Any) -> str:
    return f"a DTensor with placements {tuple(tensor.placements)}"


def distribute(part: torch.Tensor, like: torch.Tensor, over: Over | None = None, elements: int = 1) -> torch.Tensor:
    """A DTensor made of a local part, or the part itself if the parameter is a plain tensor."""
    kind: Any = distributed_tensor_type()
    if kind is None or not isinstance(like, kind):
        return part
    if part.storage_offset() and dtensors_have_parts():
        # States on the host are views of shared memory. A DTensor would repeat the part's storage offset without a
        # storage, and `async_save` would use the result as an address.
        start = part.new_empty(0).set_(part.untyped_storage(), 0, part.shape, part.stride())
        return with_part(distribute(start, like, over, elements), part)
    mesh, shape, placements = like.device_mesh, _shape_of(like, over, elements), _placements(like, over)
    has_shape_of_param = over is None and elements == 1
    stride = like.stride() if has_shape_of_param else torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        if has_shape_of_param and part.shape != local_part(like).shape:
            return _replicated(part, mesh)
        if part.device.type != mesh.device_type:
            # `from_local` would copy the part to the mesh's device, and checkpoints would load into the copy.
            return distributed_like(part, like, shape, stride, placements)
        return kind.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _shape_of(like: torch.Tensor, over: Over | None, elements: int) -> torch.Size:
    """The full shape of a DTensor's buffer."""
    return torch.Size(shape_of_entries(like.shape if over is None else _without(like.shape, over), elements))


def _without(shape: torch.Size, *overs: Over) -> torch.Size:
    gone = {dim for over in overs for dim in range(*over)}
    return torch.Size([1 if dim in gone else size for dim, size in enumerate(shape)])


def _placements(like: Any, *overs: Over | None) -> tuple[Any, ...]:
    """The placements of a parameter, replicated where they cut a dimension in `overs`."""
    from torch.distributed.tensor import Replicate

    gone, dims = [dim for over in overs for dim in range(*(over or (0, 0)))], like.dim()
    return tuple(Replicate() if not cut.is_replicate() and cut.dim % dims in gone else cut for cut in like.placements)


def slices_here(like: Any, *overs: Over) -> torch.Tensor:
    """The flat indices of the slices in this rank's part of a DTensor, int64, in the order of the part."""
    shape = _without(like.shape, *overs)
    numbers = _replicated(torch.arange(shape.numel(), device="cpu").view(shape), like.device_mesh)
    return local_part(numbers.redistribute(placements=_placements(like, *overs))).reshape(-1)


def logical_coordinates(like: Any) -> list[torch.Tensor]:
    """For each dimension of a DTensor the global coordinates of its local part, int64."""
    return [slices_here(like, (0, dim), (dim + 1, like.dim())) for dim in range(like.dim())]


def first_index(like: Any, label: str) -> int:
    """The memory index, in the full tensor, of a DTensor's first element on this rank."""
    index = 0
    for along, stride in zip(logical_coordinates(like), like.stride()):
        if not len(along):
            return 0
        first = int(along[0])
        if int(along[-1]) - first != len(along) - 1:
            raise StateError(
                f"{label} is {_placed(like)}: its local part is not contiguous in the whole tensor, whose elements "
                "index the random bits. Leave out rounding='stochastic' in its group, or shard it evenly"
            )
        index += first * stride
    return index


def local_state(
    label: str,
    state: Mapping[str, Any],
    param: torch.Tensor,
    buffers: Iterable[str],
    overs: Mapping[str, Over] | None = None,
    wholes: Iterable[str] = (),
    entries: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """A parameter's state with the local parts of its buffers, and `wholes`, which each rank has whole."""
    if not is_distributed(param):
        for name, value in state.items():
            if type(value) is not torch.Tensor and is_distributed(value):
                raise StateError(f"state {name!r} of {label} is a DTensor, but the parameter is a plain tensor")
        return dict(state)
    parts = dict(state)
    for name in buffers:
        value = parts.get(name)
        if isinstance(value, torch.Tensor):
            parts[name] = _part_like(value, param, (overs or {}).get(name), (entries or {}).get(name, 1))
    parts.update({name: parts[name].full_tensor() for name in wholes if is_distributed(parts.get(name))})
    return parts


def _part_like(value: Any, like: Any, over: Over | None = None, elements: int = 1) -> torch.Tensor:
    """This rank's part of a value, distributed as a buffer of `like`; the full value if its shape differs."""
    shape, placements = _shape_of(like, over, elements), _placements(like, over)
    if is_distributed(value) and value.device_mesh == like.device_mesh:
        is_same = value.shape == shape and value.placements == placements
        if not is_same and sendable(value) is not value:
            return restored(_part_like(sendable(value), like, over, elements), value.dtype)
        if value.shape == shape:
            return local_part(value if is_same else value.redistribute(placements=placements))
        return local_part(value) if is_whole(value) else value.full_tensor()
    value = gathered(value) if is_distributed(value) else value.detach()
    if value.shape != shape:
        return value
    whole = _replicated(sendable(value), like.device_mesh)
    return restored(local_part(whole.redistribute(placements=placements)), value.dtype)


def _replicated(value: torch.Tensor, mesh: Any) -> Any:
    """A replicated DTensor of a tensor that every rank has, without communication."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)


def sendable(value: Any) -> Any:
    """A tensor in a dtype that collectives support: int32 for int16, uint8 for float8."""
    if value.dtype is torch.int16:
        return value.to(torch.int32)
    return value.view(torch.uint8) if value.dtype.is_floating_point and value.dtype.itemsize == 1 else value


def restored(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `sendable`."""
    return value.view(dtype) if value.dtype is torch.uint8 and dtype is not torch.uint8 else value.to(dtype)


def gathered(value: Any) -> torch.Tensor:
    """The full tensor of a DTensor; all ranks of its mesh must call it."""
    return restored(sendable(value.detach()).full_tensor(), value.dtype)


@torch.no_grad()
def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor into another of the same full shape; each may be a DTensor, with any placements."""
    if is_distributed(target):
        local_part(target).copy_(_part_like(value, target))
    elif is_distributed(value):
        target.copy_(gathered(value))
    else:
        target.copy_(value)


_PLAIN_GRADIENTS = {*PLAIN, type(None)}


class LocalGradients:
    """Finds the tensors that kernels read for gradients: local parts of DTensors, and views of these."""

    def __init__(self, labels: Sequence[str], params: Sequence[torch.Tensor], cuts: Sequence[Cut | None]) -> None:
        self._labels = list(labels)
        self._params = list(params)
        self._layouts = layouts(params)
        self.views = [place for place, cut in enumerate(cuts) if cut is not None or params[place].is_complex()]
        """The indices of parameters whose entries are views: complex parameters, and parameters cut into splits."""
        self._cuts = cuts

    def parts(self, gradients: Sequence[Any]) -> list[Any]:
        """The local parts of gradients, or views of these."""
        # A gradient whose placements differ from its parameter's (for example a partial sum) is redistributed, and the
        # result becomes the parameter's `grad`, with the placements that later readers expect.
        now = layouts(gradients)
        if not all(map(operator.is_, now, self._layouts)):
            gradients = list(gradients)
            for place, (layout, before) in enumerate(zip(now, self._layouts)):
                if layout is before or gradients[place] is None:
                    continue
                if (
                    layout is None
                    or before is None
                    or layout.placements != before.placements
                    or layout.mesh != before.mesh
                ):
                    gradients[place] = self._placed(place, gradients[place], layout)
                else:
                    # Later gradients often share this spec: compare identities first.
                    self._layouts[place] = layout
        parts = local_parts(gradients)
        if not set(map(type, parts)) <= _PLAIN_GRADIENTS:
            parts = list(map(ready, parts))
        for place in self.views:
            if parts[place] is not None:
                parts[place] = self._viewed(place, parts[place])
        return parts

    def _viewed(self, place: int, gradient: Any) -> Any:
        # A lazily conjugated gradient is resolved, and the result becomes the parameter's `grad`.
        param, cut = self._params[place], self._cuts[place]
        if param.is_complex() and gradient.dtype is not param.dtype:
            raise GradientError(
                f"the gradient of {self._labels[place]} has dtype {gradient.dtype}, but the parameter has {param.dtype}"
            )
        plain = resolved(gradient)
        if plain is not gradient and param.grad is gradient:
            param.grad = plain
        if cut is None or plain.layout is not torch.strided or plain.shape != local_part(param).shape:
            return as_real(plain)
        return cut.of(plain.detach())

    def _placed(self, place: int, gradient: Any, layout: Any) -> Any:
        param: Any = self._params[place]
        label = self._labels[place]
        if layout is None or self._layouts[place] is None:
            kinds = ("a plain tensor", "a DTensor") if layout is None else ("a DTensor", "a plain tensor")
            raise GradientError(f"the gradient of {label} is {kinds[0]}, but the parameter is {kinds[1]}")
        if gradient.device_mesh != param.device_mesh:
            raise GradientError(
                f"the gradient of {label} is on {gradient.device_mesh}, but the parameter is on {param.device_mesh}"
            )
        try:
            param.grad = gradient.redistribute(placements=param.placements)
        except (RuntimeError, NotImplementedError) as error:
            raise GradientError(
                f"cannot redistribute the gradient of {label} from placements {gradient.placements} to the "
                f"parameter's {param.placements}: {error}"
            ) from error
        return param.grad


REAL_INSTEAD = "store torch.view_as_real of it as the module's parameter, and call torch.view_as_complex in forward"
"""The remedy in messages that refuse complex parameters."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a complex tensor's real and imaginary parts in a last dimension of size 2; a real tensor unchanged."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def as_complex(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A buffer of `as_real(like)` as a buffer of `like`: the inverse of `as_real`."""
    return torch.view_as_complex(tensor) if like.is_complex() else tensor


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Resolve torch's lazy conjugation and negation of a complex tensor."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor

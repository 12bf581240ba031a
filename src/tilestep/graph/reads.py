"""What a rule asks of its tensors in Python: branches become guards, sizes values of the graph, the rest is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..rules.scalars import ScalarCalls
from .ir import Level
from .lowering import LOWERINGS
from .nearest import RANDOM, nearest
from .recorder import Recorder


class Reads(ScalarCalls):
    """Catches the Python reads of a rule: branches become guards."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__bool__":
            return self.recorder.branch(args[0])
        if name == "__setitem__":
            raise self.recorder.unsupported("assigning to elements of a tensor has no translation to a kernel")
        if func in _MAKERS and args and isinstance(args[0], (bool, int, float)):
            dtype = torch.bool if isinstance(args[0], bool) else torch.float64
            return self.recorder.scalar(self.recorder.build.constant(args[0]), dtype)
        if name in RANDOM:
            raise self.recorder.unsupported(f"{name} draws random numbers", nearest(name))
        if name == "log_sigmoid":  # torch makes a second tensor for its gradient
            return torch.clamp(args[0], max=0) - torch.log1p(torch.exp(-torch.abs(args[0])))
        if name == "full_like" and len(args) == 2 and isinstance(args[1], torch.Tensor) and not args[1].dim():
            return torch.empty_like(args[0], **(kwargs or {})).copy_(args[1])
        if name in ("item", "__float__", "__int__", "__index__", "tolist", "numpy"):
            raise self.recorder.read_error(args[0])
        dim: Any = args[1] if len(args) == 2 else (kwargs or {}).get("dim")
        if name in ("numel", "nelement"):
            return self._count(args[0], range(args[0].dim()))
        if name == "size" or func == _SHAPE:
            self.recorder.reads_shape = True
            every = range(args[0].dim())
            sizes = tuple(self._count(args[0], [each]) for each in (every if dim is None else [every[dim]]))
            return sizes if dim is None else sizes[0]
        if (name in _OF_MEMORY or func == _BYTES) and args[0].dim():
            what = "nbytes" if func == _BYTES else _OF_MEMORY[name]
            raise self.recorder.unsupported(
                f"{what} of a tensor is another for each parameter; ask for .size(0), .numel()"
            )
        if name in ("dim", "ndimension") or func == _DIMENSIONS or self._may_depend_on_dimensions(name, (args, kwargs)):
            self.recorder.reads_shape = True
        return super().__torch_function__(func, types, args, kwargs)

    def _count(self, tensor: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
        return self.recorder.scalar(self.recorder.count(tensor, dims))

    def _may_depend_on_dimensions(self, name: str, given: Any) -> bool:
        """Whether torch may take a function apart in one way for vectors and in another for matrices, unseen by us.

        `a @ b` is a sum for vectors, and `torch.linalg.norm(x, 1)` another norm for matrices. What has an entry in
        `LOWERINGS` arrives there whole; of the rest, only what is known to be the same for all is taken to be.
        """
        bare = name.strip("_").removesuffix(".default")
        if bare in LOWERINGS or bare in _ALIKE:
            return False
        return any(isinstance(each, torch.Tensor) and self._may_have_dimensions(each) for each in tree_leaves(given))

    def _may_have_dimensions(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the rule has dimensions for some parameter, if not for this one."""
        node = self.recorder.node_of.get(id(tensor))
        is_data = node is not None and self.recorder.values[node].level > Level.GROUP
        return tensor.dim() > 0 or (is_data and self.recorder.build.dims == 0)


_ALIKE = frozenset(
    (
        *("bool", "get", "set", "pos", "and", "or", "xor", "invert", "rand", "ror", "rxor", "iand", "ior", "ixor"),
        *("radd", "iadd", "isub", "rmul", "imul", "truediv", "rtruediv", "itruediv", "rdiv", "idiv", "rpow", "ipow"),
        *("floordiv", "rfloordiv", "ifloordiv", "mod", "rmod", "imod", "floor_divide", "true_divide", "divide"),
        *("multiply", "subtract", "negative", "positive", "absolute", "square", "clip", "norm", "dist", "any", "all"),
        *("greater", "greater_equal", "less", "less_equal", "not_equal", "to", "float", "double", "type", "type_as"),
        *("tensor", "as_tensor", "scalar_tensor", "empty", "empty_like", "requires_grad", "isposinf", "isneginf"),
        *("arctan", "arctan2", "tan", "atan", "asin", "acos", "sinh", "cosh"),
        *("log10", "frac", "fix", "logit", "expit", "special_expit", "erfc", "hypot", "logaddexp", "xlogy", "signbit"),
        *("softplus", "silu", "gelu", "elu", "leaky_relu", "hardtanh", "hardsigmoid", "hardswish"),
    )
)
"""Functions that mean the same for a tensor of any number of dimensions, beside those in `LOWERINGS`."""

_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_OF_MEMORY = {"__len__": "len()", "stride": "stride()"}
_BYTES = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_DIMENSIONS = torch.Tensor.ndim.__get__  # type: ignore[attr-defined]

"""The local parts of gradients, step by step, without a look at each DTensor where nothing has changed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..compat import layouts, local_parts
from ..errors import GradientError
from .local import ready

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


class LocalGradients:
    """Finds this rank's part of each gradient of a list of parameters."""

    def __init__(self, labels: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        self._labels = list(labels)
        self._params = list(params)
        self._layouts = layouts(params)

    def parts(self, gradients: Sequence[Any]) -> list[Any]:
        """The local parts of gradients.

        A gradient that is distributed otherwise than its parameter (a partial sum, say) is redistributed, and the
        result becomes the parameter's `grad`: the same gradient, as later readers expect it.
        """
        found = layouts(gradients)
        if not all(map(operator.is_, found, self._layouts)):
            gradients = list(gradients)
            for place, (layout, known) in enumerate(zip(found, self._layouts)):
                if layout is known or gradients[place] is None:
                    continue
                if (
                    layout is None
                    or known is None
                    or layout.placements != known.placements
                    or layout.mesh != known.mesh
                ):
                    gradients[place] = self._placed(place, gradients[place], layout)
                else:
                    # Whoever makes gradients often makes the next ones with the same description.
                    self._layouts[place] = layout
        parts = local_parts(gradients)
        return parts if set(map(type, parts)) <= _PLAIN else list(map(ready, parts))

    def _placed(self, place: int, gradient: Any, layout: Any) -> Any:
        param: Any = self._params[place]
        label = self._labels[place]
        if layout is None or self._layouts[place] is None:
            kinds = ("a plain tensor", "a DTensor") if layout is None else ("a DTensor", "a plain tensor")
            raise GradientError(f"the gradient of {label} is {kinds[0]}, and the parameter {kinds[1]}")
        if gradient.device_mesh != param.device_mesh:
            raise GradientError(
                f"the gradient of {label} lies on {gradient.device_mesh}, the parameter on {param.device_mesh}"
            )
        try:
            param.grad = gradient.redistribute(placements=param.placements)
        except (RuntimeError, NotImplementedError) as error:
            raise GradientError(
                f"the gradient of {label} has placements {gradient.placements}, its parameter has {param.placements}, "
                f"and torch cannot redistribute it: {error}"
            ) from error
        return param.grad

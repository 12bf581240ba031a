"""A float32 master of a 16-bit parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .format import Term, dtype_name, if_rounds_to
from .masters import MasterFormat, master_format


@master_format(True)
class Master(MasterFormat):
    """A float32 master; its rounded 16-bit copy is written in the same pass.

    A copy that differs from the rounded master was written by other code, and overrides the master.
    """

    dtypes = (torch.bfloat16, torch.float16)
    key = "master_param"
    buffer_dtype = torch.float32
    begins_as_parameter = True

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"master_of_{dtype_name(self.dtype)}"

    def load(self, elements: Sequence[Term]) -> Term:
        copy, master = elements
        return if_rounds_to(copy, master.number().named("value"))

    def store(self, value: Term) -> tuple[Term, ...]:
        return value.element(self.dtype).named("copy"), value.element(torch.float32).named("master")

    def is_exact(self, compute: torch.dtype) -> bool:
        return compute is torch.float32

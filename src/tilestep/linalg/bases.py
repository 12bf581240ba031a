"""Orthogonal bases: eigenvectors, the factor of a QR decomposition, and the order of a basis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .operations import MatrixOperation, Run, register

_SHIFT = 1e-30


def _into(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def _finite(squares: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """The matrices plus `shift` times the identity; non-finite matrices are replaced by the identity.

    LAPACK raises or returns NaN for infinite matrices.
    """
    identity = torch.eye(squares.size(-1), dtype=squares.dtype, device=squares.device)
    finite = torch.where(squares.isfinite().all(dim=-1).all(dim=-1)[..., None, None], squares, identity)
    return finite + shift * identity if shift else finite


def _eigenbasis(operands: Sequence[torch.Tensor], _: Sequence[float], out: torch.Tensor | None) -> torch.Tensor:
    return _into(torch.linalg.eigh(_finite(operands[0], _SHIFT)).eigenvectors.flip(-1), out)


def _descending(operands: Sequence[torch.Tensor], _: Sequence[float], out: torch.Tensor | None) -> torch.Tensor:
    ahead, basis = operands
    sizes = (basis * ahead).sum(dim=-2)
    order = sizes.argsort(dim=-1, descending=True)
    picked = torch.nn.functional.one_hot(order, order.size(-1)).mT
    return _into(picked.to(basis.dtype), out)


def _registered(name: str, operands: int, run: Run, *, waits: bool = False) -> Callable[..., torch.Tensor]:
    """Register an operation; returns a torch operator on single matrices, for rules."""
    operation = register(MatrixOperation(name, operands, lambda *spaces: spaces[0], run, waits=waits))
    taken = ", ".join(f"Tensor matrix_{place}" for place in range(operands))

    @torch.library.custom_op(f"tilestep::{name}", mutates_args=(), schema=f"({taken}) -> Tensor")
    def call(*matrices: torch.Tensor) -> torch.Tensor:
        return operation.run([matrix.unsqueeze(0) for matrix in matrices], [], None).squeeze(0).contiguous()

    @call.register_fake
    def _(*matrices: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(matrices[0])

    return call


eigenbasis = _registered("eigenbasis", 1, _eigenbasis, waits=True)
"""The eigenvectors of a symmetric matrix as columns, by decreasing eigenvalue."""

orthogonal_basis = _registered(
    "orthogonal_basis", 1, lambda operands, _, out: _into(torch.linalg.qr(_finite(operands[0])).Q, out), waits=True
)
"""Q of a square matrix's QR decomposition."""

descending = _registered("descending", 2, _descending)
"""The permutation that sorts the columns q of a basis by decreasing q^T A q; takes A @ basis and the basis."""

"""Operations on whole matrices: a small table of them, and running them in batches of one shape."""

from __future__ import annotations

from .bases import descending, eigenbasis, orthogonal_basis
from .operations import MATRIX_OPERATIONS, MatrixOperation, keeping_to, limit_workspace, matmul, register, transpose
from .orthogonal import COEFFICIENTS, orthogonalize

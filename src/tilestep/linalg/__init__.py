"""Operations on whole matrices (Newton-Schulz, QR, eigenvectors), run in batches of the same shape."""

from __future__ import annotations

from . import bases
from .coefficients import COEFFICIENTS
from .operations import MATRIX_OPERATIONS, limit_workspace, limited_workspace
from .orthogonal import orthogonalize

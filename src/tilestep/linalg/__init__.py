"""Operations on whole matrices: a small table of them, and running them in batches of one shape."""

from __future__ import annotations

from . import bases
from .coefficients import COEFFICIENTS
from .operations import MATRIX_OPERATIONS, keeping_to, limit_workspace
from .orthogonal import orthogonalize

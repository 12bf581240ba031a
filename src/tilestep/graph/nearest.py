"""What to write in the place of an operation that has no translation."""

from __future__ import annotations

ALTERNATIVE = (
    "write it with elementwise torch operations (arithmetic, sqrt, exp, where, clamp, sign, ...) or reductions"
)
"""What is proposed where nothing is nearer."""

_IN_PLACES = "an element can depend on those at its own place in other buffers, and on reductions"
_SHAPES = (
    "values keep the parameter's shape: reduce whole tensors as they are, rows and columns with keepdim=True, and let "
    "broadcasting do the rest"
)
_DECOMPOSITIONS = (
    "tilestep.orthogonalize(x) is the U V^T of a matrix, and `@` multiplies matrices; for a tensor's largest "
    "singular value, .norm() is a bound"
)
_ORDERS = "nothing here sorts: .amax(), .mean() and .norm() measure a tensor, and torch.where and clamp cut it off"
_RANDOM = "random numbers are refused, since steps must repeat; draw them into the gradient before the step"
_VARIANCE = "write ((x - x.mean()) ** 2).mean(), with dim= and keepdim=True for rows or columns"
_SOFTMAX = "subtract x.amax(dim=-1, keepdim=True), take exp() and divide by its .sum(dim=-1, keepdim=True)"
_PRODUCT = "write (a * b).sum() for a product of vectors, a @ b for one of matrices"

_NEAREST: dict[str, tuple[str, ...]] = {
    _VARIANCE: ("std", "var", "std_mean", "var_mean"),
    _SOFTMAX: ("_softmax", "_log_softmax", "logsumexp"),
    "write x.abs().log().sum().exp() where no element is zero or negative": ("prod",),
    "compare with the extremum instead: x == x.amax()": ("argmax", "argmin"),
    _DECOMPOSITIONS: (
        *("_linalg_svd", "linalg_svd", "_linalg_eigh", "linalg_eigh", "linalg_eig", "linalg_qr", "linalg_inv_ex"),
        *("linalg_pinv", "linalg_cholesky_ex", "_linalg_solve_ex", "linalg_solve_triangular", "linalg_lstsq"),
        *("linalg_matrix_exp", "_linalg_slogdet", "_linalg_det", "linalg_lu_factor_ex", "cholesky", "inverse"),
    ),
    _ORDERS: ("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "argsort", "quantile", "histc", "unique"),
    _RANDOM: (
        *("rand_like", "randn_like", "randint_like", "rand", "randn", "randint", "randperm", "bernoulli", "normal"),
        *("uniform", "native_dropout", "multinomial", "exponential", "normal_functional"),
    ),
    _PRODUCT: ("dot", "vdot", "mv", "bmm", "baddbmm", "trace", "inner"),
    _SHAPES: ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "expand", "unfold"),
    _IN_PLACES: (
        *("cat", "stack", "roll", "flip", "index", "select", "slice", "gather", "scatter", "index_put", "diff"),
        *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "split", "split_with_sizes", "unbind", "narrow"),
        *("diagonal", "diagonal_copy", "diag_embed", "tril", "triu", "convolution", "avg_pool2d", "repeat"),
    ),
}

RANDOM = frozenset(
    (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "normal_"),
        *("feature_dropout", "gumbel_softmax", "rrelu", "uniform_", "bernoulli_", "random_", "cauchy_", "log_normal_"),
        *("exponential_", "geometric_", "poisson", "binomial", "dropout_", "rrelu_", "alpha_dropout_"),
    )
)
"""Functions and methods of torch that draw random numbers, as a rule calls them."""

_BY_OPERATION = {operation: text for text, operations in _NEAREST.items() for operation in operations}


def nearest(operation: str) -> str:
    """What works and comes nearest to an operation.

    Example:
        >>> nearest("aten.std.correction").split(",")[0]
        'write ((x - x.mean()) ** 2).mean()'
        >>> nearest("aten.special_bessel_j0.default") is ALTERNATIVE
        True
    """
    _, _, rest = operation.rpartition("aten.")
    return _RANDOM if operation in RANDOM else _BY_OPERATION.get(rest.split(".")[0].rstrip("_"), ALTERNATIVE)

"""What to write in the place of what has no translation: an operation, or an `if` that only the device can decide."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence

Branch = tuple["ast.If | ast.IfExp", ast.stmt, "ast.stmt | None"]
"""A branch, its statement, and the statement that follows."""


def rewritten(place: str) -> str:
    """The lines that could stand for a branch, joined by "; "; empty where it is not simple enough."""
    file, _, line = place.rpartition(":")
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ""
    branches = list(_branches(tree, int(line))) if line.isdigit() else []
    if not branches:
        return ""
    branch, statement, following = branches[-1]
    lines = [_Replaced(branch).visit(statement)] if isinstance(branch, ast.IfExp) else _statements(branch, following)
    return "; ".join(ast.unparse(ast.fix_missing_locations(each)) for each in lines)


def _branches(node: ast.AST, line: int) -> Iterator[Branch]:
    """Branches whose condition stands at a line, outer ones first."""
    for field in ("body", "orelse", "finalbody"):
        given = getattr(node, field, None)
        listed: list[ast.stmt] = given if isinstance(given, list) else []
        for index, statement in enumerate(listed):
            if not statement.lineno <= line <= (statement.end_lineno or line):
                continue
            following = listed[index + 1] if index + 1 < len(listed) else None
            if isinstance(statement, ast.If) and _is_at(statement.test, line):
                yield statement, statement, following
            if not hasattr(statement, "body"):
                for inner in ast.walk(statement):
                    if isinstance(inner, ast.IfExp) and _is_at(inner.test, line):
                        yield inner, statement, following
            yield from _branches(statement, line)


def _is_at(test: ast.expr, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _where(test: ast.expr, if_true: ast.expr, if_false: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Name("tilestep", ast.Load()), "where", ast.Load())
    return ast.Call(function, [_Elementwise().visit(test), if_true, if_false], [])


class _Elementwise(ast.NodeTransformer):
    """`and`, `or` and `not` as `&`, `|` and `~`, which tensors have."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        joined = node.values[0]
        for value in node.values[1:]:
            joined = ast.BinOp(joined, ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr(), value)
        return joined

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return ast.UnaryOp(ast.Invert(), node.operand) if isinstance(node.op, ast.Not) else node


class _Replaced(ast.NodeTransformer):
    """A conditional expression as a call."""

    def __init__(self, branch: ast.IfExp) -> None:
        self.branch = branch

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return _where(node.test, node.body, node.orelse) if node is self.branch else self.generic_visit(node)


def _statements(branch: ast.If, following: ast.stmt | None) -> list[ast.stmt]:
    first, last = branch.body[-1], branch.orelse[-1] if branch.orelse else following
    if len(branch.body) == 1 and isinstance(first, ast.Return) and isinstance(last, ast.Return):
        return [ast.Return(_chosen(branch.test, first.value, last.value))] if first.value and last.value else []
    taken, other = _assigned(branch.body), _assigned(branch.orelse)
    if taken is None or other is None:
        return []
    names = [*{**taken, **other}]
    chosen = [
        _where(branch.test, *(side.get(name, ast.Name(name, ast.Load())) for side in (taken, other))) for name in names
    ]
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    if len(names) == 1:
        return [ast.Assign(targets, chosen[0])]
    return [ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple(chosen, ast.Load()))] if names else []


def _chosen(test: ast.expr, left: ast.expr, right: ast.expr) -> ast.expr:
    if isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple) and len(left.elts) == len(right.elts):
        pairs = zip(left.elts, right.elts)
        return ast.Tuple([a if ast.dump(a) == ast.dump(b) else _where(test, a, b) for a, b in pairs], ast.Load())
    return _where(test, left, right)


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr] | None:
    """What statements give to names, none of it computed from another; None for statements of other kinds."""
    found: dict[str, ast.expr] = {}
    for statement in body:
        if isinstance(statement, ast.Pass):
            continue
        given = _given(statement)
        used = {node.id for value in given.values() for node in ast.walk(value) if isinstance(node, ast.Name)}
        if not given or (used | given.keys()) & found.keys():
            return None
        found.update(given)
    return found


def _given(statement: ast.stmt) -> dict[str, ast.expr]:
    """The names that a statement assigns to or changes in place, with their new values; empty for other statements."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = statement.target.id
        return {name: ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value)}
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _changed(statement.value)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return {}
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = [(each.id, new) for each, new in zip(target.elts, value.elts) if isinstance(each, ast.Name)]
        return dict(pairs) if len(pairs) == len(value.elts) else {}
    return {}


def _changed(call: ast.Call) -> dict[str, ast.expr]:
    """The tensor that a method changes in place, and its new value."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return {}
    if not function.attr.endswith("_") or function.attr.endswith("__"):
        return {}
    if function.attr == "copy_" and len(call.args) == 1:
        return {function.value.id: call.args[0]}
    method = ast.Attribute(function.value, function.attr[:-1], ast.Load())
    return {function.value.id: ast.Call(method, call.args, call.keywords)}


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

"""The arrows between modules: no circles, one direction, nothing reaches into another module or asks for its face.

The allow-lists below may only shrink: what stands there is still to be done.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import tilestep

SOURCE = Path(tilestep.__file__).parent
FACE = ""
"""The package itself, as a module."""

LAYERS = (
    ("errors", "_version", "devices"),
    ("compat", "kernels"),
    ("rules", "graph", "linalg", "storage"),
    ("backends", "native", "schedule", "kernels.spec", "kernels.outputs"),
    ("placement", "timeline"),
    (
        "norm",
        "runtime",
        "backends.registry",
        "backends.eager",
        "backends.cpp.run",
        "backends.triton.run",
        "backends.triton.slices",
    ),
    ("stats",),
    ("optimizer",),
    ("amp", "schedules", "memory"),
    ("planning", "tracing", "checking", "eject"),
    ("bench", "cli", "integrations"),
)
"""From the ground up. A module imports from its own layer and from those before it."""

CIRCLES: set[tuple[str, ...]] = set()
"""Circles that are still there, by the folders that they go through."""

UPWARD: set[tuple[str, str]] = set()
"""Arrows against the layers that are still there."""

BACKENDS = ("backends", "runtime", "compat", "devices")
"""Folders that may ask for the type of a device."""


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.lru_cache(maxsize=1)
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def folder_of(module: str) -> str:
    return module.partition(".")[0]


@functools.lru_cache(maxsize=1)
def packages() -> frozenset[str]:
    return frozenset(name_of(path) for path in SOURCE.rglob("__init__.py"))


def imports(module: str) -> Iterator[str]:
    """What a module imports of the package: anywhere, for types or inside functions too."""
    inside = module.split(".") if module in packages() and module else module.split(".")[:-1]
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            named = [alias.name.split(".")[1:] for alias in node.names if alias.name.split(".")[0] == "tilestep"]
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "tilestep"):
            start = inside[: len(inside) - (node.level - 1)] if node.level else []
            words = (node.module or "").split(".")
            base = [word for word in start + (words if node.level else words[1:]) if word]
            named = [[*base, alias.name] if ".".join([*base, alias.name]) in trees() else base for alias in node.names]
        else:
            continue
        yield from (".".join(words) for words in named if ".".join(words) != module)


@functools.lru_cache(maxsize=1)
def arrows() -> dict[str, frozenset[str]]:
    return {module: frozenset(name for name in imports(module) if name in trees()) for module in trees()}


def circles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Sets of modules that all lead to one another (Tarjan's)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            place = stack.index(module)
            if len(stack) - place > 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for module in graph:
        if module not in index:
            visit(module)
    return found


def test_circles_are_found() -> None:
    chain = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert circles(chain) == [["a", "b", "c"]]
    assert circles({"a": frozenset("b"), "b": frozenset(), "c": frozenset("ab")}) == []


def test_imports_of_all_kinds_are_seen() -> None:
    assert "backends.eager" in arrows()["backends.registry"], "inside a function"
    assert "errors" in arrows()["kernels.cache"] and "rules.protocol" in arrows()["rules"]
    assert len(arrows()) > 100 and sum(map(len, arrows().values())) > 500


def test_nothing_imports_in_circles() -> None:
    seen = [circle for circle in circles(arrows()) if tuple(sorted(set(map(folder_of, circle)))) not in CIRCLES]
    assert not seen, seen


def test_nothing_inside_imports_the_face() -> None:
    assert [module for module in arrows() if FACE in arrows()[module]] == []


def test_imports_run_down() -> None:
    levels = {name: level for level, names in enumerate(LAYERS) for name in names}

    def height(module: str, default: int) -> int:
        words = module.split(".")
        prefixes = [".".join(words[:end]) for end in range(len(words), 0, -1)]
        return next((levels[prefix] for prefix in prefixes if prefix in levels), default)

    upward = {
        (module, target)
        for module, targets in arrows().items()
        for target in targets
        if module != FACE and height(module, 99) < height(target, 0)
    }
    assert upward <= UPWARD, sorted(upward - UPWARD)


def reaching(module: str) -> list[str]:
    """Underscore attributes that a module reads of objects whose class is another module's."""
    tree = trees()[module]
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    kinds = (ast.FunctionDef, ast.ClassDef)
    own |= {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and not ast.unparse(node.value).startswith(("torch", "dist"))
    ]


def asked_devices(module: str) -> list[str]:
    """Comparisons with a type of device."""
    return [
        ast.unparse(node)
        for node in ast.walk(trees()[module])
        if isinstance(node, ast.Compare)
        and any(
            isinstance(end, ast.Constant) and end.value in ("cuda", "cpu") for end in (node.left, *node.comparators)
        )
    ]


def test_no_module_reaches_into_another() -> None:
    """Private APIs of torch and Triton are in compat; the template of ejected files stands alone, without compat."""
    seen = {module: reaching(module) for module in trees() if folder_of(module) != "compat" and reaching(module)}
    assert set(seen.pop("eject.template")) == {"param._version", "local(param)._version"}
    assert not seen, seen


def test_few_ask_for_the_type_of_a_device() -> None:
    """Ten at most, backends with them; none beside those of `devices`, of backends and of names that a user gives."""
    seen = {module: asked_devices(module) for module in trees() if asked_devices(module)}
    assert sum(map(len, seen.values())) <= 10, seen
    others = {module for module in seen if folder_of(module) not in BACKENDS}
    assert others <= {"memory.offload", "placement.reduction"}, seen


def test_classes_stay_what_they_are() -> None:
    """Nothing assigns to `__class__`, and no class is derived from the optimizer but for those of rules."""
    assigned = [
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "__class__"
    ]
    assert not assigned, assigned
    classes = list(derived(tilestep.Optimizer))
    inside = [each for each in classes if each.__module__.startswith("tilestep.")]
    assert len(classes) > 10 and not inside, inside


def derived(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from derived(each)


GONE = (
    *("DeviceClock", "OverlapReport", "EarlyNorms", "RankMonitor", "PieceSchedule", "_make_inner", "_anchor_group"),
    *("UpdateInParts", "measure_bandwidths", "FixedTensors", "TensorFingerprint", "TapText", "SegmentTaps"),
    *("GradientSync", "GradientRounds", "GradReadiness", "BackwardTracker", "DeferredUpdates", "TakesGradients"),
    *("begin_again", "begin_ahead_again"),
    *("Scan", "Gradients", "GroupWatch", "ViewedMembers"),
    *("InPlace", "default_constants", "sum_of_versions"),
)
"""Mechanisms that others have taken in."""

MOST = {
    "wide classes": 2,
    "modules that ask for addresses": 7,
    "functions that C++ exports": 12,
    "packages that import each other": 0,
}
"""What a reader must hold. A change that adds a mechanism names the one it removes; these numbers only fall."""


CEILINGS = {"classes": 309, "functions and lambdas that only pass a call on": 106}
"""More of these may not be added; a change that removes some lowers the number."""


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute, ast.Constant, ast.Starred))


def _only_passes_on(node: ast.AST) -> bool:
    """Whether a function or lambda is one chain of calls and attributes, whose arguments are not computed."""
    if isinstance(node, ast.Lambda):
        return isinstance(node.body, (ast.Call, ast.Attribute)) and all(map(_is_plain, getattr(node.body, "args", [])))
    if not isinstance(node, ast.FunctionDef) or (node.name.startswith("__") and node.name.endswith("__")):
        return False
    body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    value = body[0].value if len(body) == 1 and isinstance(body[0], (ast.Return, ast.Expr)) else None
    while isinstance(value, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(value, ast.Call):
            if not all(map(_is_plain, [*value.args, *(keyword.value for keyword in value.keywords)])):
                return False
            value = value.func
        else:
            value = value.value
    return isinstance(value, ast.Name)


def test_few_classes_and_functions_that_only_pass_on() -> None:
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    found = dict(
        zip(CEILINGS, (sum(isinstance(node, ast.ClassDef) for node in nodes), sum(map(_only_passes_on, nodes))))
    )
    assert all(found[name] <= most for name, most in CEILINGS.items()), found


def _is_wide(node: ast.ClassDef) -> bool:
    methods = [part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
    stored = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    }
    stored |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
    bound = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
    stored |= {name.id for target in bound for name in ast.walk(target) if isinstance(name, ast.Name)}
    return (node.end_lineno or 0) - node.lineno >= 350 or len(methods) > 24 or len(stored) > 20


ROOT = {"__main__", "_version", "amp", "errors", "schedule"}
"""Modules beside the packages: what is public, the version and the entry of `python -m`."""


def test_the_root_shows_what_is_public() -> None:
    beside = {module for module in trees() if module not in packages() and "." not in module}
    assert beside == ROOT, beside ^ ROOT


def mutual_packages() -> set[tuple[str, str]]:
    """Pairs of folders, or of modules beside them, that import each other: for types and inside functions too."""
    pairs = {(folder_of(module), folder_of(target)) for module, targets in arrows().items() for target in targets}
    return {(one, other) for one, other in pairs if FACE < one < other and (other, one) in pairs}


def test_mechanisms_do_not_grow_back() -> None:
    # What is ejected runs without the library: its template is text here.
    paths = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "eject" / "template.py"]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    named = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert named.isdisjoint(GONE), named.intersection(GONE)
    native = [path.read_text() for path in (SOURCE / "native").iterdir() if path.suffix in (".cpp", ".h")]
    found = {
        "wide classes": sum(isinstance(node, ast.ClassDef) and _is_wide(node) for node in nodes),
        "modules that ask for addresses": sum("data_ptr" in path.read_text() for path in trees),
        "functions that C++ exports": sum(text.count("METH_") for text in native),
        "packages that import each other": len(mutual_packages()),
    }
    assert found == MOST

"""The template of ejected files: tables, tensors and the class.

`assembly.py` fills it in. It replaces a region between `# {name` and `# name}`, or removes a region that the rule does
not need; `# {not_name` stays where `# {name` is removed.
"""

# {header
# header}
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

tl: Any = None  # triton.language, once a parameter is on a GPU
# {globals
libdevice: Any = None
CONSTANTS: tuple[str, ...] = ()
COMBINED: tuple[dict[int, str], ...] = ()
FOLLOWING: set[str] = set()
# globals}


# {formulas
# formulas}
KERNELS: list[Callable[..., Any]] = []  # the Triton functions of this file


def jit(function: Callable[..., Any]) -> Any:
    """Mark a Triton function; `load_triton` compiles it, once a parameter is on a GPU."""
    KERNELS.append(function)
    return function


# {constexpr
SHAPES: list[Callable[..., Any]] = []


def constexpr_function(function: Callable[..., Any]) -> Any:
    """Mark a function that Triton evaluates at compile time."""
    SHAPES.append(function)
    return function


# constexpr}
def load_triton() -> None:
    """Import Triton and compile the marked functions at their first launch."""
    # {imports
    global tl, libdevice
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    # imports}

    # {constexpr
    for function in SHAPES:
        globals()[function.__name__] = triton.constexpr_function(function)
    # constexpr}
    # {constants
    for name in CONSTANTS:
        globals()[name] = tl.constexpr(globals()[name])
    # constants}
    for kernel in KERNELS:
        # One build serves all addresses: kernels look at the alignment themselves.
        tables = [name for name in kernel.__code__.co_varnames if name not in kernel.__annotations__]
        globals()[kernel.__name__] = triton.jit(kernel, do_not_specialize_on_alignment=tables)


# {kernels
@jit
def norm_total(partials, partial_count, total_norm): ...  # type: ignore[no-untyped-def]


# kernels}
# {formats
class Buffer(NamedTuple):
    """The parameter or a state of its shape: one number per element in formulas, and the tensors that store it."""

    name: str
    init: float | str  # a number, "param" for the parameter's values, or the name of a hyperparameter
    arrays: tuple[tuple[str, torch.dtype, int], ...]  # key, dtype, and number of elements per entry
    load: Callable[..., Any] | None = None  # from these tensors to numbers; None for one plain tensor
    store: Callable[..., Any] | None = None  # from numbers to these tensors


# formats}
class Kind(NamedTuple):
    """Parameters that have the same kernels."""

    formula: Callable[..., Any]
    buffers: tuple[Any, ...]  # the parameter and its states, in the order of the kernels: name, initial value, dtype
    # {scalars
    scalars: tuple[tuple[str, float | str, torch.dtype], ...]  # states of one number: name, initial value, dtype
    # scalars}
    hypers: tuple[str, ...]  # columns of the table of hyperparameters
    columns: int  # numbers per tensor that the scalar passes store for the tile passes
    span: int  # elements that one program updates
    # {not_across
    launches: tuple[tuple[str, str, dict[str, Any]], ...]  # kernel, grid, constants and options
    # not_across}
    # {across
    stages: tuple[tuple[tuple[str, str, dict[str, Any]], ...], ...]  # launches: kernel, grid, constants and options
    # across}
    # {sizes
    sizes: tuple[int, ...] = ()  # sizes that kernels read: 1 for the last dimension, 2 for the one before; 0 for numel
    # sizes}
    # {sums
    reductions: int = 1  # sums over a tensor
    # sums}
    # {across
    across: int = 0  # numbers that are reduced over all tensors
    # across}

    __hash__ = object.__hash__  # type: ignore[misc]  # compare kinds by identity


# {evaluation
def weights_to_evaluate(param: Any, **_: Any) -> dict[str, Any]:
    """The weights to evaluate and save, computed from the training weights."""
    return {"param": param}


# evaluation}
# {kinds
KINDS: dict[Any, Kind] = {}
SMALLEST, SHORTEST = 0, 0
# kinds}


def kind_of(param: Any) -> Kind:
    """The kind of a parameter; raises for a parameter without kernels."""
    key: Any = param.dtype
    # {classes
    size = "small" if param.numel() < SMALLEST else "large"
    # {blocks
    columns = row_of(param.shape)[1]
    if size == "large" and columns < SHORTEST:
        size = "short"
    elif size == "large" and (param.shape[-1] % 2 or param.shape[-1] != columns):
        size = "uneven"
    # blocks}
    # {not_dims
    key = (param.dtype, size)
    # not_dims}
    # {dims
    key = (param.dtype, param.ndim, size)
    # dims}
    # classes}
    # {not_classes
    # {dims
    key = (param.dtype, param.ndim)
    # dims}
    # not_classes}
    if key not in KINDS:
        raise ValueError(f"{key} parameters are not supported; this file has kernels for {', '.join(map(str, KINDS))}")
    return KINDS[key]


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Hyperparameters as kernels and formulas read them; raises for values that this file does not support."""
    # {fixed
    # {made_for
    made_for: dict[str, Any] = {}
    # made_for}
    for name, made in made_for.items():
        value, is_tuple = group[name], isinstance(made, tuple)
        if (not isinstance(value, (tuple, list)) or len(value) != len(made)) if is_tuple else value != made:
            another = f"; make another: tilestep eject Ejected --set {name}={value}"
            raise ValueError(f"{name}={value!r}: this file was made for {name}={made!r}{'' if is_tuple else another}")
    # fixed}
    # {guards
    # guards}
    # {ranges
    valid: dict[str, bool] = {}
    # ranges}
    for name, holds in valid.items():
        if not holds:
            raise ValueError(f"Invalid {name}: {group[name]}")
    # {numbers
    return {}
    # numbers}


def local(tensor: Any) -> Any:
    """The local tensor of a DTensor; other tensors unchanged."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


# {versions
def version_of(param: Any) -> int:
    """The number of in-place writes to a parameter, as counted by torch."""
    return int(param._version + local(param)._version)


# versions}
# {formats
def strides_of(param: Any, shape: Any) -> tuple[int, ...]:
    """The strides of a state of this shape: the parameter's if the shapes are equal, else contiguous."""
    return param.stride() if shape == param.shape else torch.empty(shape, device="meta").stride()


def placed(part: torch.Tensor, param: Any, shape: tuple[int, ...]) -> Any:
    """A local state tensor as a DTensor if the parameter is a DTensor, for checkpoints."""
    if not hasattr(param, "placements"):
        return part
    layout = {"run_check": False, "shape": torch.Size(shape), "stride": strides_of(param, shape)}
    return type(param.data).from_local(part, param.device_mesh, param.placements, **layout)


# formats}
# {blocks
BLOCK = 128  # elements of a row that share a scale; the last block of a row may be shorter


def row_of(shape: Any) -> tuple[tuple[int, ...], int]:
    """The dimensions that index rows of blocks, and the number of elements in a row."""
    if not shape:
        return (), 1
    dim, columns = len(shape) - 1, int(shape[-1])
    while dim > 1 and columns < BLOCK:
        dim -= 1
        columns *= int(shape[dim])
    return tuple(shape[:dim]), columns


def cut(tensor: torch.Tensor, columns: int, elements: int = 1) -> torch.Tensor:
    """The entries of a tensor, one row per block; a short block is padded with zeros."""
    rows = tensor.reshape(-1, -(-columns // elements))
    missing = -(-columns // BLOCK) * (BLOCK // elements) - rows.shape[1]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(1).expand(len(rows), missing)], 1)
    return rows.reshape(-1, BLOCK // elements)


def joined(blocks: torch.Tensor, shape: Any, columns: int, elements: int = 1) -> torch.Tensor:
    """The inverse of `cut`."""
    per_row = -(-columns // BLOCK) * (BLOCK // elements)
    return blocks.reshape(-1, per_row)[:, : -(-columns // elements)].reshape(tuple(shape))


# blocks}
# {formats
def shape_of(shape: Any, elements: int) -> tuple[int, ...]:
    """The shape of a tensor that stores a buffer of a parameter of this shape."""
    # {blocks
    if elements > 1:
        lead, columns = row_of(shape)
        return (*lead, -(-columns // elements))
    # blocks}
    return tuple(shape)


def values_of(kind: Kind, tensors: dict[str, Any], shape: Any) -> dict[str, torch.Tensor]:
    """The values of buffers, in float32."""
    values = {}
    for name, _, arrays, load, _ in kind.buffers:
        kept = [local(tensors[key]) for key, _, _ in arrays]
        # {blocks
        if any(elements > 1 for _, _, elements in arrays):
            columns = row_of(shape)[1]
            blocks = [cut(tensor, columns, elements) for tensor, (_, _, elements) in zip(kept, arrays)]
            values[name] = joined(load(*blocks), shape, columns)
            continue
        # blocks}
        values[name] = load(*kept) if load else kept[0].float()
    return values


def keep(kind: Kind, tensors: dict[str, Any], shape: Any, results: dict[str, torch.Tensor]) -> None:
    """Store new values in the tensors of buffers and scalar states."""
    for name, _, arrays, _, store in kind.buffers:
        if name in results:
            kept, number = [local(tensors[key]) for key, _, _ in arrays], results[name].float()
            # {blocks
            columns, in_blocks = row_of(shape)[1], any(elements > 1 for _, _, elements in arrays)
            number = cut(number.expand(shape), columns) if in_blocks else number
            # blocks}
            entries = store(number) if store else [number]
            # {blocks
            if in_blocks:
                entries = [
                    joined(one, each.shape, columns, array[2]) for one, each, array in zip(entries, kept, arrays)
                ]
            # blocks}
            for tensor, entry in zip(kept, entries):
                tensor.copy_(entry)
    # {scalars
    for name, *_ in kind.scalars:
        if name in results:
            tensors[name].copy_(results[name])
    # scalars}


# formats}
def check_state(kind: Kind, param: Any, state: dict[str, Any]) -> None:
    """Raise if other code replaced a parameter or a state by a tensor that kernels do not support."""
    part = local(param)
    # {not_formats
    for name, _, dtype in kind.buffers:
        array = local(param if name == "param" else state[name])
        expected = (dtype, part.shape, part.stride(), part.device)
        # not_formats}
        # {formats
    for name, dtype, elements in [array for buffer in kind.buffers for array in buffer.arrays]:
        array, shape = local(param if name == "param" else state[name]), shape_of(part.shape, elements)
        expected = (dtype, shape, strides_of(part, shape), part.device)
        # formats}
        actual = (array.dtype, array.shape, array.stride(), array.device)
        if actual != expected:
            raise ValueError(f"{name} is {actual}, expected {expected}: delete the state to reset it")


# {across
def together(formulas: list[Any]) -> list[Any]:
    """Run formulas in lockstep; a number that they yield, with "sum" or "max", is reduced over all formulas."""
    results: list[Any] = [None] * len(formulas)
    combined = None
    while True:
        yielded = []
        for place, formula in enumerate(formulas):
            try:
                yielded.append(formula.send(combined))
            except StopIteration as end:
                results[place] = end.value
        if not yielded:
            return results
        numbers = torch.stack([number.double() for _, number in yielded])
        combined = numbers.sum() if yielded[0][0] == "sum" else numbers.amax()


# across}
def upload(device: torch.device, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A table on a device; the host does not wait for the copy."""
    table = torch.tensor(values or [0], dtype=dtype)
    return table.to(device) if device.index is None else table.pin_memory().to(device, non_blocking=True)


def tiles_of(lengths: list[int], size: int) -> tuple[list[int], list[int]]:
    """Divide tensors of these lengths into tiles: the first tile of each tensor, and the tensor of each tile."""
    counts = [-(-length // size) for length in lengths]
    owners = [place for place, count in enumerate(counts) for _ in range(count)]
    return [0, *accumulate(counts)][:-1], owners


class Tables:
    """The tables that the kernels of a kind read: tensors, tiles, addresses and hyperparameters."""

    def __init__(self, kind: Kind, members: list[Any], device: torch.device, norm_tile: int, shares: Any) -> None:
        for param, _, state, _ in members:
            check_state(kind, param, state)
        # {not_formats
        keys = [name for name, *_ in kind.buffers]
        # not_formats}
        # {formats
        keys = [key for buffer in kind.buffers for key, _, _ in buffer.arrays]
        # formats}
        arrays = [local(param if key == "param" else state[key]) for param, _, state, _ in members for key in keys]
        lengths = [local(param).numel() for param, *_ in members]
        table, zeros = partial(upload, device), partial(torch.zeros, device=device)
        self.kind, self.dtype, self.device, count = kind, members[0][0].dtype, device, len(members)
        # {clip
        norm_first, norm_owner = tiles_of(lengths, norm_tile)
        # clip}
        # {blocks
        # {clip
        norm_numel = lengths
        # clip}
        columns = [0] * count
        if any(elements > 1 for buffer in kind.buffers for _, _, elements in buffer.arrays):
            rows = [row_of(local(param).shape)[1] for param, *_ in members]
            columns = [row if row % BLOCK else length for row, length in zip(rows, lengths)]
            lengths = [size // max(row, 1) * -(-row // BLOCK) * BLOCK for size, row in zip(lengths, columns)]
        # blocks}
        first_tile, tile_tensor = tiles_of(lengths, kind.span)
        # {sizes
        sizes = [
            math.prod(param.shape) if place == 0 else param.shape[-place] if place <= param.ndim else 1
            for param, *_ in members
            for place in kind.sizes
        ]
        # sizes}
        self.tables = {
            "counts": table([count]),
            "group": table([group for *_, group in members], torch.int32),
            "addresses": table([array.data_ptr() for array in arrays]),
            "numel": table(lengths),
            # {sizes
            "sizes": table(sizes),
            # sizes}
            "tile_tensor": table(tile_tensor, torch.int32),
            "first_tile": table(first_tile),
            "rows": zeros(count * kind.columns),
            # {sums
            "partials": zeros(len(tile_tensor) * kind.reductions, dtype=torch.float64),
            "sums": zeros(count * kind.reductions, dtype=torch.float64),
            # sums}
            # {across
            "global_parts": zeros(count * kind.across, dtype=torch.float64),
            "totals": zeros(kind.across, dtype=torch.float64),
            # across}
            # {blocks
            "columns": table(columns),
            # {clip
            "norm_numel": table(norm_numel),
            # clip}
            # blocks}
            # {clip
            "norm_owner": table(norm_owner, torch.int32),
            "norm_first": table(norm_first),
            "weights": table([shares[param] for param, *_ in members], torch.float64),
            # clip}
        }
        # {clip
        self.programs = {"blocks": -(-count // 128), "tiles": len(tile_tensor), "norm": len(norm_owner)}
        # clip}
        # {not_clip
        self.programs = {"blocks": -(-count // 128), "tiles": len(tile_tensor)}
        # not_clip}
        # {sums
        self.programs["tensors"] = count
        # sums}
        # For kernels, the numbers of all tensors are in one tensor; states are views of it.
        # {scalars
        for name, _, dtype in kind.scalars:
            numbers = torch.stack([state[name].to(device, dtype) for _, _, state, _ in members])
            self.tables[name if name == "step" else f"{name}_state"] = numbers
            for (_, _, state, _), view in zip(members, numbers.unbind()):
                state[name] = view
        # scalars}
        # {not_scalars
        self.tables["step"] = torch.stack([state["step"].to(device, torch.float32) for _, _, state, _ in members])
        for (_, _, state, _), view in zip(members, self.tables["step"].unbind()):
            state["step"] = view
        # not_scalars}
        self.known: dict[str, list[Any]] = {}  # the values in tables that change from step to step
        self.kept = [list(state.values()) for _, _, state, _ in members]  # kept alive: kernels have their addresses

    def refresh(self, numbers: list[dict[str, float]], members: list[Any]) -> None:
        """Update the addresses of gradients and the hyperparameters."""
        grads = [0 if grad is None else grad.data_ptr() or 1 for _, grad, _, _ in members]
        hyper = [own[name] for own in numbers for name in self.kind.hypers]
        for name, values, dtype in (("grads", grads, torch.int64), ("hyper", hyper, torch.float64)):
            if values != self.known.get(name):
                self.known[name], self.tables[name] = values, upload(self.device, values, dtype)

    def launch(self, name: str, grid: str, options: dict[str, Any]) -> None:
        """Launch a kernel with the tables named by its parameters."""
        if self.programs[grid]:
            kernel, math_function = globals()[name], globals().get(options.get("MATH", ""))
            values = {**self.tables, "ELEMENT": getattr(tl, str(self.dtype)[6:]), "MATH": math_function}
            arguments = {key: values[key] for key in kernel.arg_names if key in values}
            kernel[(self.programs[grid],)](**{"enable_fp_fusion": False, **options, **arguments})


class Ejected(torch.optim.Optimizer):
    # {signature
    """An optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    # signature}

    known: list[Any] | None = None  # the identities of the tensors in the tables
    # {clip
    grad_norm: torch.Tensor | None = None  # the gradients' norm in the last step
    # clip}
    # {versions
    versions: dict[Any, int] | None = None  # the versions of parameters after their last step
    # versions}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; see `torch.optim.Optimizer`."""
        numbers_of({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; see `torch.optim.Optimizer`. States keep this optimizer's dtypes and memory layout."""
        states: dict[Any, Any] = {}
        # Another optimizer's checkpoint does not have every hyperparameter.
        groups = [{**group, **saved} for group, saved in zip(self.param_groups, state_dict["param_groups"])]
        groups += state_dict["param_groups"][len(groups) :]
        for group, whole in zip(self.param_groups, groups):
            numbers_of(whole)
            for param, number in zip(group["params"], whole["params"]):
                if number in state_dict["state"]:
                    states[param] = self.init_state(param, whole, state_dict["state"][number])
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        self.state.update(states)
        # {versions
        self.versions = {param: version_of(param) for group in self.param_groups for param in group["params"]}
        # versions}

    def init_state(self, param: Any, group: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter: initial values, or the values of a checkpoint."""
        part, kind = local(param).detach(), kind_of(param)
        # {whole
        if part.shape != param.shape:
            raise ValueError(f"this rule sums over whole tensors, but a parameter is sharded: {param.placements}")
        # whole}
        # {not_blocks
        if torch.empty_like(part).stride() != part.stride():
            raise ValueError(f"a parameter {tuple(part.shape)} has strides {part.stride()}; make it contiguous")
        # not_blocks}
        # {blocks
        if not part.is_contiguous():
            raise ValueError(f"a parameter has strides {part.stride()}; make it contiguous")
        # blocks}
        # {scalars
        state: dict[str, Any] = {}
        for name, init, dtype in kind.scalars:
            value = values.get(name, group.get(str(init), init))
            state[name] = torch.as_tensor(value, dtype=dtype).to(part.device, copy=True)
        # scalars}
        # {not_scalars
        state = {"step": torch.as_tensor(values.get("step", 0.0), dtype=torch.float32).to(part.device, copy=True)}
        # not_scalars}
        # {not_formats
        for name, init, dtype in kind.buffers[1:]:
            value = values.get(name, param.detach() if init == "param" else group.get(str(init), init))
            state[name] = torch.empty_like(param, dtype=dtype)
            state[name].copy_(value) if isinstance(value, torch.Tensor) else state[name].fill_(value)
        # not_formats}
        # {formats
        for buffer in kind.buffers:
            tensors = {}
            for key, dtype, elements in buffer.arrays:
                shape = shape_of(part.shape, elements)
                tensors[key] = torch.empty_strided(shape, strides_of(part, shape), dtype=dtype, device=part.device)
            start: Any = group.get(str(buffer.init), buffer.init)
            if all(key in values for key in tensors if key != "param"):
                for key in tensors.keys() - {"param"}:
                    tensors[key].copy_(local(values[key]))
            elif buffer.name in values:  # of another format
                value = local(values[buffer.name]).to(part.device).float()
                keep(kind, tensors, part.shape, {buffer.name: value})
                values = {**tensors, **{key: one for key, one in values.items() if key != buffer.name}}
            elif start == "param":
                keep(kind, tensors, part.shape, {buffer.name: part.float()})
            else:
                for tensor in tensors.values():
                    tensor.fill_(float(start))
            if values and buffer.name == "param":  # masters missing in a checkpoint start from the parameter
                values = {**tensors, **values, "param": None}
            for key, _, elements in buffer.arrays:
                if key != "param":
                    state[key] = placed(tensors[key], param, shape_of(param.shape, elements))
        # formats}
        # {averages
        if "training_param" in values:
            state["training_param"] = torch.empty_like(param).copy_(values["training_param"])
        # averages}
        if values and values.keys() - {"step", "param"} != state.keys() - {"step"}:
            raise ValueError(f"the checkpoint has states {sorted(values)}, the optimizer has {sorted(state)}")
        return state

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        # {averages
        if any("training_param" in state for state in self.state.values()):
            raise RuntimeError("parameters hold the evaluation weights: call train() before step()")
        # averages}
        with torch.enable_grad():
            loss = None if closure is None else closure()
        numbers = [numbers_of(group) for group in self.param_groups]
        found = self.members()
        members = [member for own in found.values() for member in own]
        params = [param for param, *_ in members]
        # {versions
        for param, _, state, _ in members:
            if (self.versions or {}).get(param, version_of(param)) != version_of(param):
                for key in FOLLOWING & state.keys():
                    local(state[key]).zero_()  # other code wrote to the parameter
        # versions}
        # {clip
        if not params:  # a rank without gradients joins the sum of the norm
            params = [param for group in self.param_groups for param in group["params"]][:1]
        # clip}
        device, *others = {local(param).device for param in params} or {torch.device("cpu")}
        if others:
            raise ValueError(f"parameters are on {device} and {others}: create one optimizer per device")
        if device.index is None:  # a CPU
            self.step_in_torch(found, numbers, device)
        else:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("step() cannot be captured: replays would repeat this step's hyperparameters")
            with torch.cuda.device(device):  # Triton launches on the current one
                self.step_by_kernels(found, numbers, device)
        torch.autograd.graph.increment_version([param for param, grad, *_ in members if grad is not None])
        # {versions
        self.versions = {param: version_of(param) for param, *_ in members}
        # versions}
        return loss

    # {averages
    def eval(self) -> None:
        """Put the weights to evaluate and save into the parameters."""
        self.train(False)

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Put the training weights back into the parameters; with False, the weights to evaluate and save."""
        for group in self.param_groups:
            for param in group["params"]:
                state, part = self.state.get(param, {}), local(param).detach()
                if not state or mode is not ("training_param" in state):
                    continue
                if mode:
                    part.copy_(local(state.pop("training_param")))
                else:
                    kind, tensors = kind_of(param), {**state, "param": part}
                    values: dict[str, Any] = {"step": state["step"].double()}
                    values |= {name: torch.tensor(own, dtype=torch.float64) for name, own in numbers_of(group).items()}
                    # {not_formats
                    values |= {name: local(tensors[name]).float() for name, *_ in kind.buffers}
                    # not_formats}
                    # {formats
                    values |= values_of(kind, tensors, part.shape)
                    # formats}
                    # {scalars
                    values |= {name: state[name].double() for name, *_ in kind.scalars}
                    # scalars}
                    state["training_param"] = param.detach().clone()
                    part.copy_(weights_to_evaluate(**values)["param"])
                torch.autograd.graph.increment_version([param])
                # {versions
                self.versions = {**(self.versions or {}), param: version_of(param)}
                # versions}

    # averages}
    def members(self) -> dict[Kind, list[Any]]:
        """Parameters with a gradient or a state, by kind; each with its local gradient, state and group index."""
        found: dict[Kind, list[Any]] = {kind: [] for kind in KINDS.values()}
        for place, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None and not self.state.get(param):
                    continue
                part, grad = local(param), local(param.grad)
                if grad is not None:
                    actual, expected = (
                        (local(one).layout, one.dtype, local(one).shape, getattr(one, "placements", None))
                        for one in (param.grad, param)
                    )
                    if actual != expected:
                        raise ValueError(f"a gradient is {actual}, expected {expected}")
                    if grad.stride() != part.stride():  # kernels iterate over both in memory order
                        grad = torch.empty_like(part).copy_(grad)
                if not self.state.get(param):
                    self.state[param] = self.init_state(param, group, {})
                found[kind_of(param)].append((param, grad, self.state[param], place))
        return {kind: members for kind, members in found.items() if members}

    # {clip
    def shares(self, params: list[Any]) -> dict[Any, float]:
        """The weight of each parameter's squares in the norm: 1 / the number of ranks with the same local tensor."""
        everything = [param for group in self.param_groups for param in group["params"]]
        meshes = dict.fromkeys(param.device_mesh for param in everything if hasattr(param, "placements"))
        mesh: Any = max(meshes, key=lambda mesh: mesh.size(), default=None)  # the mesh over which squares are summed
        self.mesh, shares = mesh, dict.fromkeys(params, 1.0)
        for param in params if mesh is not None else ():
            own, placements = getattr(param, "device_mesh", mesh), getattr(param, "placements", ())
            ranks, others = set(mesh.mesh.flatten().tolist()), set(own.mesh.flatten().tolist())
            if others - ranks or any(one.is_partial() for one in placements):
                raise ValueError(f"a parameter is {placements} on {own}; clipping requires shards or copies on {mesh}")
            shares[param] = (
                math.prod(n for n, one in zip(own.shape, placements) if not one.is_replicate()) / mesh.size()
            )
        return shares

    def all_reduce(self, total: torch.Tensor) -> torch.Tensor:
        """Sum a number over all ranks of the mesh, in place."""
        for group in () if self.mesh is None else self.mesh.get_all_groups():
            torch.distributed.all_reduce(total, group=group)
        return total

    # clip}
    def step_in_torch(self, found: dict[Kind, list[Any]], numbers: list[Any], device: torch.device) -> None:
        """A step in plain PyTorch, tensor by tensor, for CPUs; it computes the same numbers as the kernels."""
        members = [(kind, *member) for kind, own in found.items() for member in own if member[1] is not None]
        for kind, param, _, state, _ in members:
            check_state(kind, param, state)
        # {clip
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            shares = self.shares([param for _, param, *_ in members])
            norm = torch.zeros((), dtype=torch.float64, device=device)
            for _, param, grad, *_ in members:
                norm += grad.double().square().sum() * shares[param]
            self.grad_norm = norm = self.all_reduce(norm).sqrt()
        # clip}
        # {across
        running: list[Any] = []
        # across}
        for kind, param, grad, state, place in members:
            state["step"] += 1
            tensors = {**state, "param": local(param).detach()}
            values: dict[str, Any] = {"grad": grad.float(), "step": state["step"].double(), "gradient_scale": 1.0}
            values |= {name: torch.tensor(own, dtype=torch.float64) for name, own in numbers[place].items()}
            # {not_formats
            values |= {name: local(tensors[name]).float() for name, *_ in kind.buffers}
            # not_formats}
            # {formats
            values |= values_of(kind, tensors, tensors["param"].shape)
            # formats}
            # {scalars
            values |= {name: state[name].double() for name, *_ in kind.scalars}
            # scalars}
            # {shaped
            values |= {"shape": param.shape, "machine_epsilon": torch.finfo(param.dtype).eps}
            # shaped}
            # {clip
            if values["max_grad_norm"] < math.inf:
                values["gradient_scale"] = torch.clamp(values["max_grad_norm"] / (norm + 1e-6), max=1.0)
            # clip}
            # {plain
            for name, value in kind.formula(**values).items():
                local(tensors[name]).copy_(value)
            # plain}
            # {not_plain
            # {not_across
            results = kind.formula(**values) if grad.numel() else {}
            # not_across}
            # {across
            running += [(kind, tensors, kind.formula(**values))] if grad.numel() else []
        for (kind, tensors, _), results in zip(running, together([formula for _, _, formula in running])):
            # across}
            # {not_formats
            for name, value in results.items():
                local(tensors[name]).copy_(value)
            # not_formats}
            # {formats
            keep(kind, tensors, tensors["param"].shape, results)
            # formats}
            # not_plain}

    def step_by_kernels(self, found: dict[Kind, list[Any]], numbers: list[Any], device: torch.device) -> None:
        """A step by a few launches over all tensors; the host does not synchronize."""
        if tl is None:
            load_triton()
        if self.known != self.identities(found):
            self.build(found, device)
        for tables, members in zip(self.tables, found.values()):
            tables.refresh(numbers, members)
        # {clip
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            for tables in self.tables:
                tables.launch("norm_tiles", "norm", {"TILE": self.norm_tile, "STEP": 2048, "enable_fp_fusion": True})
            norm_total[(1,)](self.partials, self.count, self.norm, BLOCK=8192, num_warps=32, enable_fp_fusion=False)
            self.grad_norm = self.all_reduce(self.norm).sqrt_()[0].clone()
        # clip}
        # {not_across
        for tables in self.tables:
            for launch in tables.kind.launches:
                tables.launch(*launch)
        # not_across}
        # {across
        for stage, ways in enumerate([*COMBINED, {}]):
            for tables in self.tables:
                for launch in tables.kind.stages[stage]:
                    tables.launch(*launch)
            combine(self.tables, ways)
        # across}

    def identities(self, found: dict[Kind, list[Any]]) -> list[Any]:
        """Kinds, groups, shapes, and tensors of parameters and states: the tables depend on them."""
        return [
            (kind, place, param.shape, param.stride(), [(id(x), local(x).data_ptr()) for x in (param, *state.values())])
            for kind, members in found.items()
            for param, _, state, place in members
        ]

    def build(self, found: dict[Kind, list[Any]], device: torch.device) -> None:
        """Build the tables of these parameters."""
        params = [param for members in found.values() for param, *_ in members]
        if len(set(params)) < len(params):
            raise ValueError("a parameter appears more than once in its param group")
        # {clip
        tile = self.norm_tile = 16384 if sum(local(param).numel() for param in params) < 2**28 else 32768
        shares = self.shares(params)
        # clip}
        self.tables = [Tables(kind, members, device, tile, shares) for kind, members in found.items()]
        # {clip
        tiles = [tables.programs["norm"] for tables in self.tables]
        self.partials = torch.zeros(sum(tiles), dtype=torch.float64, device=device)
        self.norm, self.count = self.partials.new_zeros(1), upload(device, [sum(tiles)])
        for tables, partials in zip(self.tables, self.partials.split(tiles)):
            tables.tables |= {"norm_partials": partials, "total_norm": self.norm}
        # clip}
        self.known = self.identities(found)


# {across
def combine(running: list[Tables], ways: dict[int, str]) -> None:
    """Reduce over all tensors the numbers that scalar passes store per tensor."""
    for slot, way in ways.items():
        numbers = [one.tables["global_parts"].view(-1, one.kind.across)[:, slot] for one in running]
        parts = torch.stack([part.sum() if way == "sum" else part.amax() for part in numbers])
        total = parts.sum() if way == "sum" else parts.amax()
        for one in running:
            one.tables["totals"][slot] = total


# across}

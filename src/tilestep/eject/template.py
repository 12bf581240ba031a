"""The parts that every ejected file has: tables, tensors and the class.

`assembly.py` takes this text apart. A region between `# {name` and `# name}` is replaced, or left out where a rule has
no use for it.
"""

# {header
# header}
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

tl: Any = None  # triton.language, once a parameter is on a GPU
# {globals
libdevice: Any = None
cuda_capability_geq: Any = None
CONSTANTS: tuple[str, ...] = ()
# globals}
# {settings
VALUES: dict[str, Any] = {}
FOLLOWING: set[str] = set()
# settings}
KERNELS: list[str] = []  # the Triton functions of this file


def jit(function: Callable[..., Any]) -> Any:
    """Mark a Triton function; it stays as it is until a parameter is on a GPU."""
    KERNELS.append(function.__name__)
    return function


# {constexpr
SHAPES: list[str] = []


def constexpr_function(function: Callable[..., Any]) -> Any:
    """Mark a function that Triton runs while it compiles."""
    SHAPES.append(function.__name__)
    return function


# constexpr}
def load_triton() -> None:
    """Import Triton and compile the marked functions at their first launch."""
    global tl
    # {libdevice_set
    global libdevice
    # libdevice_set}
    # {capability_set
    global cuda_capability_geq
    # capability_set}
    import triton
    import triton.language as tl

    # {libdevice
    from triton.language.extra import libdevice

    # libdevice}
    # {capability
    from triton.language.target_info import cuda_capability_geq

    # capability}
    # {constexpr_load
    for name in SHAPES:
        globals()[name] = triton.constexpr_function(globals()[name])
    # constexpr_load}
    # {constants
    for name in CONSTANTS:
        globals()[name] = triton.language.constexpr(globals()[name])
    # constants}
    for name in KERNELS:
        # One build serves all addresses: kernels look at the alignment themselves.
        parameters = inspect.signature(globals()[name]).parameters.items()
        tables = [key for key, parameter in parameters if "constexpr" not in str(parameter.annotation)]
        globals()[name] = triton.jit(globals()[name], do_not_specialize_on_alignment=tables)


# {kernels
@jit
def norm_total(partials, partial_count, total_norm): ...  # type: ignore[no-untyped-def]


# kernels}
# {formulas
# formulas}
# {formats_buffer
class Buffer(NamedTuple):
    """A tensor like the parameter, as formulas see it, and what keeps it."""

    name: str
    begins: float | str  # a number, "param" for the parameter's values, or the name of a hyperparameter
    arrays: tuple[tuple[str, torch.dtype, int], ...] = ()  # key, dtype, and of how many neighbours an entry is
    # {codec_fields
    load: Callable[..., Any] | None = None  # from these tensors to numbers; None for one tensor as it is
    store: Callable[..., Any] | None = None  # from numbers to these tensors
    # codec_fields}


# formats_buffer}
class Kind(NamedTuple):
    """Parameters that have the same kernels."""

    formula: Callable[..., Any]
    buffers: tuple[Any, ...]  # the parameter and its states: name, what it begins with, dtype or arrays
    arrays: tuple[str, ...]  # what kernels read and write beside the gradient, in the order of their table
    hypers: tuple[str, ...]  # columns of the table of hyperparameters
    columns: int  # numbers that the scalar passes leave for the tiles of a tensor
    span: int  # elements that one program updates
    # {single_kind
    launches: tuple[tuple[str, str, dict[str, Any]], ...]  # kernel, grid, constants and options
    # single_kind}
    # {stages_kind
    stages: tuple[tuple[tuple[str, str, dict[str, Any]], ...], ...]  # launches: kernel, grid, constants and options
    # stages_kind}
    # {scalar_kind
    scalars: tuple[tuple[str, float | str, torch.dtype], ...] = ()  # states of one number, the same of them
    # scalar_kind}
    # {sizes_kind
    sizes: tuple[int, ...] = ()  # sizes that kernels read, from the last dimension as 1; 0 for their product
    # sizes_kind}
    # {sums_kind
    reductions: int = 1  # sums over a tensor
    # sums_kind}
    # {across_kind
    across: tuple[tuple[tuple[int, str], ...], ...] = ()  # for each stage, numbers of all tensors to combine, and how
    # across_kind}


# {averages
def weights_to_evaluate(param: Any) -> dict[str, Any]:
    """The weights to evaluate and save, from those that train."""
    return {"param": param}


# averages}
# {kinds
KINDS: dict[Any, Kind] = {}


def kind_of(param: Any) -> Any:
    """The key of a parameter's kind."""
    return ""


def check(group: dict[str, Any]) -> None:
    """Raise for hyperparameters of a param group that are out of their ranges, or need other kernels."""


# kinds}
def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


# {versions_of
def version_of(param: Any) -> int:
    """How often a parameter was written to, as torch counts."""
    return int(param._version + local(param)._version)


# versions_of}
# {formats_placed
def placed(part: torch.Tensor, param: Any, shape: tuple[int, ...]) -> Any:
    """A part of a state as a DTensor where the parameter is one; checkpoints need that."""
    if not hasattr(param, "placements"):
        return part
    stride = param.stride() if shape == param.shape else torch.empty(shape, device="meta").stride()
    layout = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return type(param.data).from_local(part, param.device_mesh, param.placements, **layout)


# formats_placed}
# {blocks
BLOCK = 128  # neighbours along a row that share a scale; the last block of a row is shorter


def row_of(shape: Any) -> tuple[tuple[int, ...], int]:
    """The dimensions that count rows of blocks, and the elements of a row."""
    if not shape:
        return (), 1
    dim, columns = len(shape) - 1, int(shape[-1])
    while dim > 1 and columns < BLOCK:
        dim -= 1
        columns *= int(shape[dim])
    return tuple(shape[:dim]), columns


def cut(tensor: torch.Tensor, columns: int, elements: int = 1) -> torch.Tensor:
    """The entries of a tensor, a row for each block, with zeros behind a short block."""
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
# {formats_shape
def shape_of(shape: Any, elements: int) -> tuple[int, ...]:
    """The shape of a tensor that keeps a buffer of a parameter of this shape."""
    # {blocks_shape
    if elements > 1:
        lead, columns = row_of(shape)
        return (*lead, -(-columns // elements))
    # blocks_shape}
    return tuple(shape)


def values_of(buffer: Buffer, tensors: dict[str, Any], shape: Any) -> torch.Tensor:
    """The numbers that a buffer keeps, in float32."""
    kept = [local(tensors[key]) for key, _, _ in buffer.arrays]
    # {blocks_load
    if buffer.load is not None and any(elements > 1 for _, _, elements in buffer.arrays):
        columns = row_of(shape)[1]
        blocks = [cut(tensor, columns, elements) for tensor, (_, _, elements) in zip(kept, buffer.arrays)]
        return joined(buffer.load(*blocks), shape, columns)
    # blocks_load}
    # {codec_load
    if buffer.load is not None:
        return buffer.load(*kept)
    # codec_load}
    return kept[0].float()


def keep(buffer: Buffer, tensors: dict[str, Any], shape: Any, values: torch.Tensor) -> None:
    """Write new numbers into what keeps a buffer."""
    kept = [local(tensors[key]) for key, _, _ in buffer.arrays]
    # {blocks_store
    if buffer.store is not None and any(elements > 1 for _, _, elements in buffer.arrays):
        columns = row_of(shape)[1]
        entries = buffer.store(cut(values.float().expand(shape), columns))
        for tensor, entry, (_, _, elements) in zip(kept, entries, buffer.arrays):
            tensor.copy_(joined(entry, tensor.shape, columns, elements))
        return
    # blocks_store}
    # {codec_store
    if buffer.store is not None:
        for tensor, entry in zip(kept, buffer.store(values.float())):
            tensor.copy_(entry)
        return
    # codec_store}
    kept[0].copy_(values)


# formats_shape}
def check_state(kind: Kind, param: Any, state: dict[str, Any]) -> None:
    """Raise where other code has made a parameter or its state other tensors than kernels take."""
    part = local(param)
    # {plain_check
    wanted = [(name, dtype, part.shape) for name, _, dtype in kind.buffers]
    # plain_check}
    # {formats_check
    arrays = [array for buffer in kind.buffers for array in buffer.arrays]
    wanted = [(key, dtype, shape_of(part.shape, elements)) for key, dtype, elements in arrays]
    # formats_check}
    for name, dtype, shape in wanted:
        array = local(param if name == "param" else state[name])
        strides = part.stride() if shape == part.shape else torch.empty(shape, device="meta").stride()
        found, right = (array.dtype, array.shape, array.stride(), array.device), (dtype, shape, strides, part.device)
        if found != right:
            raise ValueError(f"{name} is {found}; its parameter needs {right}: delete the state to begin anew")


# {clip_shares
def mesh_of(groups: list[dict[str, Any]]) -> Any:
    """The largest mesh of parameters, over which squares are added up; None where no parameter has one."""
    params = [param for group in groups for param in group["params"]]
    meshes = dict.fromkeys(param.device_mesh for param in params if hasattr(param, "placements"))
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def share(param: Any, mesh: Any) -> float:
    """How much this rank's squares of a parameter count: one over the ranks that hold the same part of it."""
    if mesh is None:
        return 1.0
    own, placements = getattr(param, "device_mesh", mesh), getattr(param, "placements", ())
    ranks = set(mesh.mesh.flatten().tolist())
    if not ranks.issuperset(own.mesh.flatten().tolist()) or any(one.is_partial() for one in placements):
        raise ValueError(f"a parameter is {placements} on {own}; the norm adds up shards and copies on {mesh}")
    return math.prod(size for size, one in zip(own.shape, placements) if not one.is_replicate()) / mesh.size()


def add_up(total: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The sum of a number over all ranks of a mesh, in place."""
    for dim in range(0 if mesh is None else mesh.ndim):
        torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total


# clip_shares}
# {across_together
def together(formulas: list[Any]) -> list[Any]:
    """Run formulas side by side; a number that they yield, with "sum" or "max", is combined over all of them."""
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


# across_together}
def upload(device: torch.device, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A table on a device; the host does not wait for the copy."""
    table = torch.tensor(values or [0], dtype=dtype)
    return table.to(device) if device.index is None else table.pin_memory().to(device, non_blocking=True)


def tiles_of(lengths: list[int], size: int) -> tuple[list[int], list[int]]:
    """Tensors of these lengths in tiles: the first tile of each tensor, and the tensor of each tile."""
    counts = [-(-length // size) for length in lengths]
    owners = [place for place, count in enumerate(counts) for _ in range(count)]
    return [0, *accumulate(counts)][:-1], owners


class Tables:
    """What the kernels of one kind read: tensors, tiles, addresses and hyperparameters."""

    def __init__(self, kind: Kind, members: list[Any], device: torch.device) -> None:
        self.kind, self.members = kind, members
        table, zeros = partial(upload, device), partial(torch.zeros, device=device)
        count = len(members)
        lengths = [local(param).numel() for param, _, _ in members]
        # {blocks_tables
        columns = [0] * count
        if any(elements > 1 for buffer in kind.buffers for _, _, elements in buffer.arrays):
            rows = [row_of(local(param).shape)[1] for param, _, _ in members]
            columns = [row if row % BLOCK else length for row, length in zip(rows, lengths)]
            lengths = [size // max(row, 1) * -(-row // BLOCK) * BLOCK for size, row in zip(lengths, columns)]
        # blocks_tables}
        first, owners = tiles_of(lengths, kind.span)
        # {sizes_tables
        sizes = [
            math.prod(param.shape) if place == 0 else param.shape[-place] if place <= param.ndim else 1
            for param, _, _ in members
            for place in kind.sizes
        ]
        # sizes_tables}
        self.programs = {"tensors": count, "blocks": -(-count // 128), "tiles": len(owners)}
        self.tables = {
            "counts": table([count]),
            "group": table([group for _, _, group in members], torch.int32),
            "numel": table(lengths),
            # {sizes_table
            "sizes": table(sizes),
            # sizes_table}
            "tile_tensor": table(owners, torch.int32),
            "first_tile": table(first),
            "rows": zeros(count * kind.columns),
            # {sums_tables
            "partials": zeros(len(owners) * kind.reductions, dtype=torch.float64),
            "sums": zeros(count * kind.reductions, dtype=torch.float64),
            # sums_tables}
            # {across_tables
            "global_parts": zeros(count * sum(map(len, kind.across)), dtype=torch.float64),
            "totals": zeros(sum(map(len, kind.across)), dtype=torch.float64),
            # across_tables}
            # {blocks_columns
            "columns": table(columns),
            # blocks_columns}
        }
        self.known: dict[str, list[Any]] = {}  # what changes from step to step, as in its tables
        # Numbers of all tensors lie side by side for kernels; a state has views of its own.
        # {no_scalar_tables
        self.tables["step"] = torch.stack([state["step"].to(device, torch.float32) for _, state, _ in members])
        for (_, state, _), view in zip(members, self.tables["step"].unbind()):
            state["step"] = view
        # no_scalar_tables}
        # {scalar_tables
        for name, dtype in [("step", torch.float32), *((name, dtype) for name, _, dtype in kind.scalars)]:
            numbers = torch.stack([state[name].to(device, dtype) for _, state, _ in members])
            self.tables[name if name == "step" else f"{name}_state"] = numbers
            for (_, state, _), view in zip(members, numbers.unbind()):
                state[name] = view
        # scalar_tables}
        self.kept = [list(state.values()) for _, state, _ in members]  # alive, so that no other tensor gets their ids

    # {clip_for_norm
    def for_norm(self, mesh: Any, tile: int) -> int:
        """Make the tables of the norm; returns the number of its tiles."""
        params, table = [param for param, _, _ in self.members], partial(upload, self.tables["rows"].device)
        lengths = [local(param).numel() for param in params]
        first, owners = tiles_of(lengths, tile)
        self.norm = {"ELEMENT": params[0].dtype, "TILE": tile, "STEP": 2048, "enable_fp_fusion": True}
        self.programs["norm"] = len(owners)
        self.tables |= {"norm_numel": table(lengths), "norm_first": table(first)}
        self.tables["norm_owner"] = table(owners, torch.int32)
        self.tables["weights"] = table([share(param, mesh) for param in params], torch.float64)
        return len(owners)

    # clip_for_norm}
    def refresh(self, groups: list[dict[str, Any]], gradients: list[Any]) -> None:
        """Bring addresses and hyperparameters up to date."""
        keys, now = self.kind.arrays, dict[str, list[Any]]()
        arrays = [local(param if key == "param" else state[key]) for param, state, _ in self.members for key in keys]
        now["grads"] = [0 if grad is None else grad.data_ptr() or 1 for grad in gradients]
        now["addresses"] = [array.data_ptr() for array in arrays]
        if now["addresses"] != self.known.get("addresses"):
            for param, state, _ in self.members:
                check_state(self.kind, param, state)
        now["hyper"] = [number_of(group, name) for group in groups for name in self.kind.hypers]
        for name, values in now.items():
            if values != self.known.get(name):
                dtype = torch.float64 if name == "hyper" else torch.int64
                self.known[name], self.tables[name] = values, upload(self.tables["rows"].device, values, dtype)

    def launch(self, name: str, grid: str, options: dict[str, Any]) -> None:
        """Launch a kernel with the tables that its parameters name."""
        if self.programs[grid]:
            kernel = globals()[name]
            pointers = [self.tables[pointer] for pointer in kernel.arg_names if pointer in self.tables]
            types = {key: getattr(tl, str(value)[6:]) for key, value in options.items() if key == "ELEMENT"}
            functions = {key: globals()[value] for key, value in options.items() if key == "MATH"}
            options = {"enable_fp_fusion": False, **options, **types, **functions}
            kernel[(self.programs[grid],)](*pointers, **options)


def identities(found: dict[Any, list[Any]]) -> list[Any]:
    """What tables are made for: parameters, their kinds, groups and shapes, and the tensors of their states."""
    return [
        (name, id(param), group, param.shape, *map(id, state.values()))
        for name, pairs in found.items()
        for (param, state, group), _ in pairs
    ]


def fixed(value: Any) -> Any:
    """What of a hyperparameter formulas and kernels were made for: numbers may have any value."""
    if isinstance(value, (tuple, list)):
        return tuple(map(fixed, value))
    return float if isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool) else value


def number_of(group: dict[str, Any], name: str) -> float:
    """A hyperparameter as kernels read it; `betas.0` is the first of `betas`."""
    key, _, place = name.partition(".")
    value = group.get(key)
    value = value[int(place)] if place and value is not None else value
    return math.inf if value is None else float(value)


def as_numbers(value: Any) -> Any:
    """A hyperparameter as formulas take it: numbers in float64."""
    if isinstance(value, (tuple, list)):
        return tuple(map(as_numbers, value))
    return value if value is None or isinstance(value, (bool, str)) else torch.tensor(float(value), dtype=torch.float64)


class Ejected(torch.optim.Optimizer):
    # {signature
    """An optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    # signature}

    tables: Sequence[Tables] = ()  # for kernels; made again when parameters or states are other ones
    known: list[Any] | None = None  # what they were made for
    # {clip_attributes
    grad_norm: torch.Tensor | None = None  # of the gradients of the last step
    mesh: Any = None  # of the ranks that share it
    # clip_attributes}
    # {versions_attribute
    versions: dict[Any, int] | None = None  # of parameters after their last step
    # versions_attribute}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's."""
        check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self.known = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, as torch's; states keep the dtypes and the order in memory that they have here."""
        own, states, saved = self.param_groups, dict[Any, Any](), state_dict["state"]
        # Another optimizer's checkpoint does not have every hyperparameter.
        groups = [
            {**group, **other, "params": group["params"]} for group, other in zip(own, state_dict["param_groups"])
        ]
        for group, other in zip(groups, state_dict["param_groups"]):
            check(group)
            for param, number in zip(group["params"], other["params"]):
                if number in saved:
                    states[param] = self.begin(param, group, saved[number])
        super().load_state_dict(state_dict)
        self.known = None
        self.state.update(states)
        for group, whole in zip(self.param_groups, groups):
            group.update({**whole, **group})
        # {versions_load
        self.versions = {param: version_of(param) for group in self.param_groups for param in group["params"]}
        # versions_load}

    def begin(self, param: Any, group: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, with the values that a checkpoint has of it."""
        part, kind = local(param).detach(), KINDS[kind_of(param)]
        # {whole
        if part.shape != param.shape:
            raise ValueError(f"a parameter is sharded, {param.placements}, and this rule sums over whole tensors")
        # whole}
        # {free
        if torch.empty_like(part).stride() != part.stride():
            raise ValueError(f"a parameter {tuple(part.shape)} has strides {part.stride()}; make it contiguous")
        # free}
        # {rows
        if not part.is_contiguous():
            raise ValueError(f"a parameter has the strides {part.stride()}; make it contiguous")
        # rows}
        state: dict[str, Any] = {}
        # {no_scalar_begin
        state["step"] = torch.as_tensor(values.get("step", 0.0), dtype=torch.float32).to(part.device, copy=True)
        # no_scalar_begin}
        # {scalar_begin
        for name, begins, dtype in (("step", 0.0, torch.float32), *kind.scalars):
            value: Any = values.get(name, group[begins] if isinstance(begins, str) else begins)
            state[name] = torch.as_tensor(value, dtype=dtype).to(part.device, copy=True)
        # scalar_begin}
        # {plain_begin
        for name, begins, dtype in kind.buffers[1:]:
            if values and name not in values:
                raise ValueError(f"the checkpoint has no state {name!r}: it is of another optimizer")
            value = values.get(name, param.detach() if begins == "param" else group.get(str(begins), begins))
            state[name] = torch.empty_like(param, dtype=dtype)
            state[name].copy_(value) if isinstance(value, torch.Tensor) else state[name].fill_(value)
        # plain_begin}
        # {formats_begin
        for buffer in kind.buffers:
            tensors = {
                key: torch.empty_like(part, dtype=dtype)
                if shape_of(part.shape, elements) == part.shape
                else part.new_empty(shape_of(part.shape, elements), dtype=dtype)
                for key, dtype, elements in buffer.arrays
            }
            start: Any = group.get(str(buffer.begins), buffer.begins)
            if all(key in values for key in tensors if key != "param"):
                for key in tensors.keys() - {"param"}:
                    tensors[key].copy_(local(values[key]))
            elif buffer.name in values:  # of another format
                keep(buffer, tensors, part.shape, local(values[buffer.name]).to(part.device).float())
            elif values and buffer.name != "param":
                raise ValueError(f"the checkpoint has no state {buffer.name!r}: it is of another optimizer")
            elif start == "param":
                keep(buffer, tensors, part.shape, part.float())
            else:
                for tensor in tensors.values():
                    tensor.fill_(float(start))
            for key, _, elements in buffer.arrays:
                if key != "param":
                    state[key] = placed(tensors[key], param, shape_of(param.shape, elements))
        # formats_begin}
        # {averages_begin
        if "training_param" in values:
            state["training_param"] = torch.empty_like(param).copy_(values["training_param"])
        # averages_begin}
        unknown = values.keys() - state.keys()
        # {formats_unknown
        unknown -= {buffer.name for buffer in kind.buffers}
        # formats_unknown}
        if unknown:
            raise ValueError(f"the checkpoint has the states {sorted(unknown)}, which this optimizer does not keep")
        return state

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        # {averages_step
        if any("training_param" in state for state in self.state.values()):
            raise RuntimeError("parameters hold the weights to evaluate: call train() before step()")
        # averages_step}
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            check(group)
        found = self.members()
        members = [member for pairs in found.values() for member, _ in pairs]
        # {versions
        for param, state, _ in members:
            if (self.versions or {}).get(param, version_of(param)) != version_of(param):
                for key in FOLLOWING & state.keys():
                    local(state[key]).zero_()  # other code has written to the parameter
        # versions}
        params = [param for param, _, _ in members]
        # {clip_joins
        if not params:  # a rank without gradients joins the sum of the norm
            params = [param for group in self.param_groups for param in group["params"]]
        # clip_joins}
        if params:
            first = local(params[0])
            if first.is_cuda:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("replays would repeat this step's hyperparameters: step outside of a CUDA graph")
                with torch.cuda.device(first.device):  # Triton launches on the current one
                    self.step_by_kernels(found, first.device)
            else:
                self.step_in_torch(found, first.device)
        written = [param for pairs in found.values() for (param, _, _), grad in pairs if grad is not None]
        torch.autograd.graph.increment_version(written)
        # {versions_record
        self.versions = {param: version_of(param) for param, _, _ in members}
        # versions_record}
        return loss

    # {averages_methods
    def eval(self) -> None:
        """Put the weights to evaluate and save into the parameters."""
        self.train(False)

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Put the weights that train back into the parameters; with False, those to evaluate and save."""
        for group in self.param_groups:
            for param in group["params"]:
                state, part = self.state.get(param, {}), local(param).detach()
                if not state or mode is not ("training_param" in state):
                    continue
                if mode:
                    part.copy_(local(state.pop("training_param")))
                else:
                    tensors, kind = {**state, "param": part}, KINDS[kind_of(param)]
                    given = {name: as_numbers(group[name]) for name in VALUES}
                    # {plain_average
                    given.update({name: local(tensors[name]).float() for name, *_ in kind.buffers})
                    # plain_average}
                    # {formats_average
                    given.update({buffer.name: values_of(buffer, tensors, part.shape) for buffer in kind.buffers})
                    # formats_average}
                    given["step"] = state["step"].double()
                    wanted = inspect.signature(weights_to_evaluate).parameters
                    state["training_param"] = param.detach().clone()
                    part.copy_(weights_to_evaluate(**{name: given[name] for name in wanted})["param"])
                torch.autograd.graph.increment_version([param])
                # {versions_average
                self.versions = {**(self.versions or {}), param: version_of(param)}
                # versions_average}

    # averages_methods}
    def members(self) -> dict[Any, list[Any]]:
        """Parameters with their states and groups, and the gradients, by kind."""
        found: dict[Any, list[Any]] = {name: [] for name in KINDS}
        devices = set()
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None and not self.state.get(param):
                    continue
                part, grad = local(param), local(param.grad)
                devices.add(part.device)
                if grad is not None:
                    kinds = [
                        (one.layout, one.dtype, tuple(one.shape), getattr(whole, "placements", None))
                        for one, whole in ((grad, param.grad), (part, param))
                    ]
                    if kinds[0] != kinds[1]:
                        raise ValueError(f"a gradient is {kinds[0]}; its parameter is {kinds[1]}")
                    if grad.stride() != part.stride():  # kernels walk both in the order of their memory
                        grad = torch.empty_like(part).copy_(grad)
                if not self.state.get(param):
                    self.state[param] = self.begin(param, group, {})
                found[kind_of(param)].append(((param, self.state[param], number), grad))
        if len(devices) > 1:
            raise ValueError(f"parameters lie on {devices}: give each device an optimizer of its own")
        return {name: pairs for name, pairs in found.items() if pairs}

    def step_in_torch(self, found: dict[Any, list[Any]], device: torch.device) -> None:
        """A step tensor by tensor: what CPUs run, and the same numbers as kernels compute."""
        pairs = [pair for own in found.values() for pair in own if pair[1] is not None]
        for (param, state, _), _ in pairs:
            check_state(KINDS[kind_of(param)], param, state)
        # {clip_in_torch
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            mesh, norm = mesh_of(self.param_groups), torch.zeros((), dtype=torch.float64, device=device)
            for (param, _, _), grad in pairs:
                norm += grad.double().square().sum() * share(param, mesh)
            self.grad_norm = norm = add_up(norm, mesh).sqrt()
        # clip_in_torch}
        # {formats_all
        running: list[Any] = []
        # formats_all}
        for (param, state, number), grad in pairs:
            state["step"] += 1
            group, part, kind = self.param_groups[number], local(param).detach(), KINDS[kind_of(param)]
            tensors = {**state, "param": part}
            given = {name: as_numbers(group[name]) for name in VALUES}
            # {plain_values
            given.update({name: local(tensors[name]).float() for name, *_ in kind.buffers})
            # plain_values}
            # {formats_values
            given.update({buffer.name: values_of(buffer, tensors, part.shape) for buffer in kind.buffers})
            # formats_values}
            # {scalar_values
            given.update({name: state[name].double() for name, _, _ in kind.scalars})
            # scalar_values}
            given.update(grad=grad.float(), step=state["step"].double(), shape=param.shape, gradient_scale=1.0)
            # {epsilon
            given["machine_epsilon"] = torch.finfo(part.dtype).eps
            # epsilon}
            # {clip_scale
            if group["max_grad_norm"] not in (None, math.inf):
                given["gradient_scale"] = torch.clamp(group["max_grad_norm"] / (norm + 1e-6), max=1.0)
            # clip_scale}
            wanted = inspect.signature(kind.formula).parameters
            if part.numel():
                results = kind.formula(**{name: given[name] for name in wanted})
                # {plain_write
                for name, values in results.items():
                    local(tensors[name]).copy_(values)
                # plain_write}
                # {formats_after
                running.append((kind, tensors, part.shape, results))
                # formats_after}
        # {across_run
        combined = together([results for _, _, _, results in running])
        running = [(*one[:3], results) for one, results in zip(running, combined)]
        # across_run}
        # {formats_keep
        for kind, tensors, shape, results in running:
            for buffer in kind.buffers:
                if buffer.name in results:
                    keep(buffer, tensors, shape, results[buffer.name])
            # {scalar_keep
            for name, _, _ in kind.scalars:
                if name in results:
                    tensors[name].copy_(results[name])
            # scalar_keep}
        # formats_keep}

    def step_by_kernels(self, found: dict[Any, list[Any]], device: torch.device) -> None:
        """A step by a few launches over all tensors; the host waits for nothing."""
        if tl is None:
            load_triton()
        if self.known != identities(found):
            self.build(found, device)
        for tables, pairs in zip(self.tables, found.values()):
            tables.refresh(self.param_groups, [grad for _, grad in pairs])
        # {clip_by_kernels
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            for tables in self.tables:
                tables.launch("norm_tiles", "norm", tables.norm)
            options = {"num_warps": 32, "enable_fp_fusion": False}
            norm_total[(1,)](self.partials, self.tile_count, self.norm, BLOCK=8192, **options)
            self.grad_norm = add_up(self.norm, self.mesh).sqrt_()[0].clone()
        # clip_by_kernels}
        # {stages_launches
        for stage in range(max((len(tables.kind.stages) for tables in self.tables), default=0)):
            running = [tables for tables in self.tables if stage < len(tables.kind.stages)]
            for tables in running:
                tables.launch(*tables.kind.stages[stage][0])
            # {across_step
            combine(running, stage)
            # across_step}
            for tables in running:
                for launch in tables.kind.stages[stage][1:]:
                    tables.launch(*launch)
        # stages_launches}
        # {single_launches
        for tables in self.tables:
            for launch in tables.kind.launches:
                tables.launch(*launch)
        # single_launches}

    def build(self, found: dict[Any, list[Any]], device: torch.device) -> None:
        """Make the tables of these parameters."""
        if len({id(param) for pairs in found.values() for (param, _, _), _ in pairs}) < sum(map(len, found.values())):
            raise ValueError("a parameter is listed twice in its group")
        self.tables = [Tables(KINDS[name], [member for member, _ in pairs], device) for name, pairs in found.items()]
        # {clip_build
        self.mesh = mesh_of(self.param_groups)
        total = sum(local(param).numel() for tables in self.tables for param, _, _ in tables.members)
        tiles = [tables.for_norm(self.mesh, 16384 if total < 2**28 else 32768) for tables in self.tables]
        self.partials = torch.zeros(sum(tiles), dtype=torch.float64, device=device)
        self.norm, self.tile_count = self.partials.new_zeros(1), upload(device, [sum(tiles)])
        for tables, partials in zip(self.tables, self.partials.split(tiles)):
            tables.tables |= {"norm_partials": partials, "total_norm": self.norm}
        # clip_build}
        self.known = identities(found)


# {across_combine
def combine(running: list[Tables], stage: int) -> None:
    """Combine the numbers that scalar passes leave for each tensor over all tensors."""
    for slot, way in running[0].kind.across[stage] if running else ():
        numbers = [one.tables["global_parts"].view(len(one.members), -1)[:, slot] for one in running]
        parts = torch.stack([part.sum() if way == "sum" else part.amax() for part in numbers])
        total = parts.sum() if way == "sum" else parts.amax()
        for one in running:
            one.tables["totals"][slot] = total


# across_combine}

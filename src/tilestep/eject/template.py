"""The parts that every ejected file has: tables, tensors and the class.

`assembly.py` takes this text apart. A region between `# {name` and `# name}` is replaced, or left out where a rule has
no use for it.
"""

# {header
# header}
from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

tl: Any = None  # triton.language, once a parameter is on a GPU
# {globals
libdevice: Any = None
cuda_capability_geq: Any = None
CONSTANTS: tuple[str, ...] = ()
# globals}
# {settings
BY_SHAPE: dict[Any, Any] = {}
VALUES: dict[str, Any] = {}
FOLLOWING: set[str] = set()
# settings}
POINTERS: dict[str, list[str]] = {}  # the Triton functions of this file, with the parameters that are tables


def jit(function: Callable[..., Any]) -> Any:
    """Mark a Triton function; it stays as it is until a parameter is on a GPU."""
    parameters = inspect.signature(function).parameters.values()
    POINTERS[function.__name__] = [each.name for each in parameters if each.annotation is inspect.Parameter.empty]
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
    import triton
    import triton.language

    # {libdevice
    from triton.language.extra import libdevice

    # libdevice}
    # {capability
    from triton.language.target_info import cuda_capability_geq
    # capability}

    globals().update(tl=triton.language)
    # {libdevice_set
    globals().update(libdevice=libdevice)
    # libdevice_set}
    # {capability_set
    globals().update(cuda_capability_geq=cuda_capability_geq)
    # capability_set}
    # {constexpr_load
    for name in SHAPES:
        globals()[name] = triton.constexpr_function(globals()[name])
    # constexpr_load}
    # {constants
    for name in CONSTANTS:
        globals()[name] = triton.language.constexpr(globals()[name])
    # constants}
    for name, pointers in POINTERS.items():
        # One build serves all addresses: kernels look at the alignment themselves.
        globals()[name] = triton.jit(globals()[name], do_not_specialize_on_alignment=pointers)


# {kernels
@jit
def norm_total(partials, partial_count, total_norm): ...  # type: ignore[no-untyped-def]


# kernels}
# {formulas
# formulas}
class Buffer(NamedTuple):
    """A tensor like the parameter, as formulas see it, and what keeps it."""

    name: str
    begins: float | str  # a number, "param" for the parameter's values, or the name of a hyperparameter
    # {plain_buffer
    dtype: torch.dtype
    # plain_buffer}
    # {formats_buffer
    arrays: tuple[tuple[str, torch.dtype, int], ...] = ()  # key, dtype, and of how many neighbours an entry is
    # formats_buffer}
    # {codec_fields
    load: Callable[..., Any] | None = None  # from these tensors to numbers; None for one tensor as it is
    store: Callable[..., Any] | None = None  # from numbers to these tensors
    # codec_fields}


class Kind(NamedTuple):
    """Parameters that have the same kernels."""

    formula: Callable[..., Any]
    buffers: tuple[Buffer, ...]
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
    scalars: tuple[tuple[str, float | str, torch.dtype], ...] = ()  # states of one number: name, beginning, dtype
    # {sizes_kind
    sizes: tuple[int, ...] = ()  # sizes that kernels read, from the last dimension as 1; 0 for their product
    # sizes_kind}
    # {sums_kind
    reductions: int = 1  # sums over a tensor
    # sums_kind}
    # {across_kind
    across: tuple[tuple[tuple[int, str], ...], ...] = ()  # for each stage, numbers of all tensors to combine, and how
    # across_kind}


# {kinds
KINDS: dict[str, Kind] = {}


def kind_of(param: Any) -> str:
    """The kind of a parameter."""
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
# {clip_shares
def shares(params: list[Any]) -> tuple[Any, list[float]]:
    """The mesh over which squares are added up, and how much each part counts: one over the ranks that hold it."""
    meshes = {param.device_mesh for param in params if hasattr(param, "placements")}
    if not meshes:
        return None, [1.0] * len(params)
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks, counts = set(largest.mesh.flatten().tolist()), []
    for param in params:
        mesh, placements = getattr(param, "device_mesh", largest), getattr(param, "placements", ())
        if not ranks.issuperset(mesh.mesh.flatten().tolist()) or any(one.is_partial() for one in placements):
            raise ValueError(f"a parameter is {placements} on {mesh}; the norm adds up shards and copies on {largest}")
        parts = [size for size, placement in zip(mesh.shape, placements) if not placement.is_replicate()]
        counts.append(math.prod(parts) / largest.size())
    return largest, counts


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
    first: list[int] = []
    owners: list[int] = []
    for place, length in enumerate(lengths):
        first.append(len(owners))
        owners += [place] * -(-length // size)
    return first, owners


class Tables:
    """What the kernels of one kind read: tensors, tiles, addresses and hyperparameters."""

    def __init__(self, kind: Kind, members: list[Any], grads: torch.Tensor, total: int) -> None:
        self.kind, self.members = kind, members
        table, zeros = partial(upload, grads.device), partial(torch.zeros, device=grads.device)
        count = len(members)
        lengths = [local(param).numel() for param, _, _ in members]
        # {clip_elements
        # {blocks_lengths
        elements = lengths
        # blocks_lengths}
        tile = 16384 if total < 2**28 else 32768
        self.norm = {"ELEMENT": members[0][0].dtype, "TILE": tile, "STEP": 2048, "enable_fp_fusion": True}
        norm_first, norm_owners = tiles_of(lengths, tile)
        # clip_elements}
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
        self.groups = sorted({group for _, _, group in members})
        self.programs = {"tensors": count, "blocks": -(-count // 128), "tiles": len(owners)}
        # {clip_tiles
        self.programs["norm"] = len(norm_owners)
        # clip_tiles}
        self.tables = {
            # {clip_tables
            # {blocks_elements
            "elements": table(elements),
            # blocks_elements}
            "norm_first": table(norm_first),
            "norm_owner": table(norm_owners, torch.int32),
            # clip_tables}
            "counts": table([count]),
            "grads": grads,
            "group": table([self.groups.index(group) for _, _, group in members], torch.int32),
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
        self.addresses: list[int] = []
        self.hypers: list[float] = []
        # Numbers of all tensors lie side by side for kernels; a state has views of its own.
        for name, dtype in [("step", torch.float32), *((name, dtype) for name, _, dtype in kind.scalars)]:
            numbers = torch.stack([state[name].to(grads.device, dtype) for _, state, _ in members])
            self.tables[name if name == "step" else f"{name}_state"] = numbers
            for (_, state, _), view in zip(members, numbers.unbind()):
                state[name] = view
        self.kept = [list(state.values()) for _, state, _ in members]  # alive, so that no other tensor gets their ids

    def refresh(self, groups: list[dict[str, Any]]) -> None:
        """Bring addresses and hyperparameters up to date."""
        addresses, device = list[int](), self.tables["rows"].device
        for param, state, _ in self.members:
            addresses += [local(param if key == "param" else state[key]).data_ptr() for key in self.kind.arrays]
        if addresses != self.addresses:
            self.addresses, self.tables["addresses"] = addresses, upload(device, addresses)
        hypers = [number_of(groups[group], name) for group in self.groups for name in self.kind.hypers]
        if hypers != self.hypers:
            self.hypers, self.tables["hyper"] = hypers, upload(device, hypers, torch.float64)

    def launch(self, name: str, grid: str, options: dict[str, Any]) -> None:
        """Launch a kernel with the tables that its parameters name."""
        if self.programs[grid]:
            pointers = [self.tables[pointer] for pointer in POINTERS[name]]
            types = {key: getattr(tl, str(value)[6:]) for key, value in options.items() if key == "ELEMENT"}
            functions = {key: globals()[value] for key, value in options.items() if key == "MATH"}
            options = {"enable_fp_fusion": False, **options, **types, **functions}
            globals()[name][(self.programs[grid],)](*pointers, **options)


def identities(members: list[Any]) -> list[Any]:
    """What tables are made for: parameters, their groups and the tensors of their states."""
    return [(id(param), group, *map(id, state.values())) for param, state, group in members]


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

    tables: list[Tables] | None = None  # for kernels; made again when parameters or states are other ones
    known: list[Any] | None = None  # what they were made for
    grads: torch.Tensor
    addresses: list[int]  # of gradients, as in their table
    # {clip_attributes
    grad_norm: torch.Tensor | None = None  # of the gradients of the last step
    mesh: Any  # of the ranks that share it
    # clip_attributes}
    # {versions_attribute
    versions: dict[Any, int] | None = None  # of parameters after their last step
    # versions_attribute}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's."""
        check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, as torch's; states keep the dtypes and the order in memory that they have here."""
        super().load_state_dict(state_dict)
        self.tables, self.known, saved = None, None, state_dict["state"]
        for group, other in zip(self.param_groups, state_dict["param_groups"]):
            for param, number in zip(group["params"], other["params"]):
                if number in saved:
                    self.state[param] = self.begin(param, group, saved[number])
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
        for name, begins, dtype in (("step", 0.0, torch.float32), *kind.scalars):
            value: Any = values.get(name, group[begins] if isinstance(begins, str) else begins)
            state[name] = torch.as_tensor(value, dtype=dtype).to(part.device, copy=True)
        # {plain_begin
        for name, begins, dtype, *_ in kind.buffers[1:]:
            if values and name not in values:
                raise ValueError(f"the checkpoint has no state {name!r}: it is of another optimizer")
            value = values.get(name, param.detach() if begins == "param" else group.get(str(begins), begins))
            state[name] = torch.empty_like(param, dtype=dtype)
            state[name].copy_(value) if isinstance(value, torch.Tensor) else state[name].fill_(value)
        unknown = values.keys() - state.keys()
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
        unknown = values.keys() - state.keys() - {buffer.name for buffer in kind.buffers}
        # formats_begin}
        if unknown:
            raise ValueError(f"the checkpoint has the states {sorted(unknown)}, which this optimizer does not keep")
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            check(group)
        members, gradients = self.members()
        # {versions
        for param, state, _ in members:
            if (self.versions or {}).get(param, version_of(param)) != version_of(param):
                for key in FOLLOWING & state.keys():
                    local(state[key]).zero_()  # other code has written to the parameter
        # versions}
        if members:
            run = self.step_by_kernels if local(members[0][0]).is_cuda else self.step_in_torch
            run(members, gradients)
        written = [param for (param, _, _), grad in zip(members, gradients) if grad is not None]
        torch.autograd.graph.increment_version(written)
        # {versions_record
        self.versions = {param: version_of(param) for param, _, _ in members}
        # versions_record}
        return loss

    def members(self) -> tuple[list[Any], list[Any]]:
        """Parameters with their states and groups, and the gradients; by kinds, as kernels have them."""
        found: dict[str, list[Any]] = {name: [] for name in KINDS}
        devices = set()
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None and not self.state.get(param):
                    continue
                part, grad = local(param), local(param.grad)
                devices.add(part.device)
                if grad is not None:
                    if grad.layout is not torch.strided or (grad.dtype, grad.shape) != (part.dtype, part.shape):
                        what = f"{grad.layout}, {grad.dtype}, {tuple(grad.shape)}"
                        raise ValueError(f"a gradient is {what}; its parameter is {part.dtype}, {tuple(part.shape)}")
                    if grad.stride() != part.stride():  # kernels walk both in the order of their memory
                        grad = torch.empty_like(part).copy_(grad)
                if not self.state.get(param):
                    self.state[param] = self.begin(param, group, {})
                found[kind_of(param)].append(((param, self.state[param], number), grad))
        if len(devices) > 1:
            raise ValueError(f"parameters lie on {devices}: give each device an optimizer of its own")
        pairs = [pair for pairs in found.values() for pair in pairs]
        return [member for member, _ in pairs], [grad for _, grad in pairs]

    def step_in_torch(self, members: list[Any], gradients: list[Any]) -> None:
        """A step tensor by tensor: what CPUs run, and the same numbers as kernels compute."""
        # {clip_in_torch
        norm = torch.zeros((), dtype=torch.float64, device=members[0][1]["step"].device)
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            mesh, counts = shares([param for param, _, _ in members])
            for grad, count in zip(gradients, counts):
                norm += 0 if grad is None else grad.double().square().sum() * count
            self.grad_norm = norm = add_up(norm, mesh).sqrt()
        # clip_in_torch}
        # {formats_all
        running: list[Any] = []
        # formats_all}
        for (param, state, number), grad in zip(members, gradients):
            if grad is None:
                continue
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
            for name, _, _ in kind.scalars:
                if name in results:
                    tensors[name].copy_(results[name])
        # formats_keep}

    def step_by_kernels(self, members: list[Any], gradients: list[Any]) -> None:
        """A step by a few launches over all tensors; the host waits for nothing."""
        if tl is None:
            load_triton()
        if self.known != identities(members):
            self.build(members)
        addresses = [0 if grad is None else grad.data_ptr() or 1 for grad in gradients]
        if addresses != self.addresses:
            self.addresses = addresses
            self.grads.copy_(upload(self.grads.device, addresses))
        assert self.tables is not None
        for tables in self.tables:
            tables.refresh(self.param_groups)
        # {clip_by_kernels
        if any(group["max_grad_norm"] is not None for group in self.param_groups):
            for tables in self.tables:
                tables.launch("norm_tiles", "norm", tables.norm)
            constants = {"ROOT": self.mesh is None, "BLOCK": 8192, "num_warps": 32, "enable_fp_fusion": False}
            norm_total[(1,)](self.partials, self.tile_count, self.norm, **constants)
            if self.mesh is not None:
                add_up(self.norm, self.mesh).sqrt_()
            self.grad_norm = self.norm[0].clone()
        # clip_by_kernels}
        # {stages_launches
        for stage in range(max(len(tables.kind.stages) for tables in self.tables)):
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

    def build(self, members: list[Any]) -> None:
        """Make the tables of these parameters."""
        device = local(members[0][0]).device
        self.tables, self.addresses = [], list[int]()
        self.grads = torch.zeros(len(members), dtype=torch.int64, device=device)
        total = sum(local(param).numel() for param, _, _ in members)
        # {clip_weights
        self.mesh, counts = shares([param for param, _, _ in members])
        weights = upload(device, counts, torch.float64)
        # clip_weights}
        start = 0
        for name, kind in KINDS.items():
            own = [member for member in members if kind_of(member[0]) == name]
            stop = start + len(own)
            if own:
                self.tables.append(Tables(kind, own, self.grads[start:stop], total))
                # {clip_weight
                self.tables[-1].tables["weights"] = weights[start:stop]
                # clip_weight}
            start = stop
        # {clip_build
        tiles = [tables.programs["norm"] for tables in self.tables]
        self.partials = torch.zeros(sum(tiles), dtype=torch.float64, device=device)
        self.norm, self.tile_count = self.partials.new_zeros(1), upload(device, [sum(tiles)])
        for tables, partials in zip(self.tables, self.partials.split(tiles)):
            tables.tables |= {"norm_partials": partials, "total_norm": self.norm}
        # clip_build}
        self.known = identities(members)


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

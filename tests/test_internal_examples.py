"""Examples of functions that stand behind the public ones."""

from __future__ import annotations


def of_graph() -> None:
    """The package `graph`.

    >>> from tilestep.graph.analysis import never_negative
    >>> from tilestep.graph import trace
    >>> from tilestep.rules import registry
    >>> graph = trace(registry["AdamW"], registry["AdamW"].hyperparameters)
    >>> [never_negative(graph, state, {"betas.1": (0.0, 1.0)}) for state in ("exp_avg", "exp_avg_sq")]
    [False, True]

    >>> import torch
    >>> from tilestep.rules.compose import displacement
    >>> displacement(torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])

    >>> from tilestep.graph.analysis import Builder, difference
    >>> build = Builder()
    >>> param, update = build.load("param"), build.load("update")
    >>> difference(build, build.apply("sub", param, update), param) is build.apply("neg", update)
    True

    >>> from tilestep.graph.ir import Builder, outcome
    >>> build = Builder()
    >>> has_momentum = build.apply("ne", build.hyper("momentum"), build.constant(0.0))
    >>> outcome(has_momentum, {"momentum": 0.0}), outcome(has_momentum, {}, ["momentum"]), outcome(has_momentum, {})
    (False, True, None)

    >>> from tilestep.graph.lowering import ALTERNATIVE, nearest
    >>> nearest("aten.std.correction").split(",")[0]
    'write ((x - x.mean()) ** 2).mean()'
    >>> nearest("aten.special_bessel_j0.default") is ALTERNATIVE
    True

    >>> from tilestep.graph.lowering import size_from_end
    >>> size_from_end("columns"), size_from_end("rows"), size_from_end("size.-3"), size_from_end("lr")
    (1, 2, 3, 0)

    >>> from tilestep.graph.lowering import sizes_of
    >>> sizes_of((5, 3, 2))
    {'numel': 30.0, 'columns': 2.0, 'rows': 3.0, 'size.-3': 5.0}

    >>> from tilestep.graph.partition import View
    >>> view = View(over=None, dims=4, rows=(2, 3))
    >>> view.extents((8, 3, 5, 7)), view.place((3, 4)), view.place((2, 3)), view.place((2, 4)), view.place((1, 4))
    ((24, 5, 7), 'row', 'column', 'matrix', 'other')

    >>> from tilestep.graph.partition import choose_views
    >>> [(view, done)] = choose_views(None, 3, [(2, 3), (1, 2)], [])
    >>> view.rows, done
    ((1, 2), [(2, 3), (1, 2)])

    >>> from tilestep.graph.partition import slice_word
    >>> slice_word((1, 2), 2), slice_word((0, 1), 2), slice_word((1, 4), 4)
    ('row', 'column', 'slice_1_4')

    >>> from tilestep.graph.partition import partition
    >>> from tilestep.graph import trace
    >>> from tilestep.rules import registry
    >>> cut = partition(trace(registry["Lion"], registry["Lion"].hyperparameters))
    >>> len(cut.tiles), cut.tiles[0].reads()
    (1, ['param', 'exp_avg', 'grad'])

    >>> from tilestep.graph.tracer import flat_numbers
    >>> flat_numbers({"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False})
    [('lr', 0.1), ('betas.0', 0.9), ('betas.1', 0.99)]

    >>> from tilestep.graph.tracer import known_numbers
    >>> known_numbers({"lr": 0.1, "momentum": torch.tensor(0.9), "nesterov": True})
    ({'lr': 0.1}, {'momentum'})

    >>> from tilestep.graph.tracer import group_value
    >>> group_value({"betas": (0.9, 0.99)}, "betas.1")
    0.99

    >>> from tilestep.graph.tracer import trace
    >>> from tilestep.rules import registry
    >>> graph = trace(registry["Lion"], registry["Lion"].hyperparameters)
    >>> sorted(graph.outputs), graph.states
    (['exp_avg', 'param'], ('exp_avg',))
    """


def of_backends() -> None:
    """The package `backends`.

    >>> from tilestep.backends.triton.slices import elements_of
    >>> elements_of(10_000), elements_of(50_000_000), elements_of(1_000_000_000)
    (4096, 8192, 32768)

    >>> from tilestep.backends.triton.slices import block_of
    >>> choose = block_of(32768)
    >>> choose(1, 4096, 4096), choose(1, 4096, 320), choose(1, 4096, 10), choose(64, 3, 3), choose(1, 1, 4096)
    ((1, 256, 128), (1, 512, 64), (1, 2048, 16), (64, 4, 4), (1, 1, 1024))

    >>> from tilestep.backends.triton.slices import held_rows
    >>> held_rows((1, 256, 128), 2), held_rows((1, 256, 128), 4), held_rows((64, 4, 4), 4)
    (16, 8, 4)

    >>> from tilestep.backends.triton.text import TritonNames
    >>> names = TritonNames(["param_array"])
    >>> [names.fresh(wanted) for wanted in ("update", "update", "size", "SPAN", "start_1", "param_array")]
    ['update', 'update_2', 'size_2', 'SPAN_', 'start_1_', 'param_array_2']

    >>> import torch
    >>> from tilestep.kernels.spec import cut_tiles, pass_traffic
    >>> from tilestep.rules import registry
    >>> from tilestep.runtime import graph_for, kernel_spec
    >>> from tilestep.storage import Plain
    >>> graph = graph_for(registry["Lion"], registry["Lion"].hyperparameters, dims=1)
    >>> storages = {name: Plain(torch.bfloat16) for name in ("param", "grad", "exp_avg")}
    >>> traffic = pass_traffic(kernel_spec(graph, storages, torch.float32, "cpu"), 0)
    >>> traffic.bytes_read, traffic.bytes_written
    (6, 4)

    >>> cut = cut_tiles([5, 0, 4], size=4)
    >>> cut.first_tile.tolist(), cut.tile_tensor.tolist()
    ([0, 2, 2], [0, 0, 2])

    >>> from tilestep.backends.cpp.text import CppNames
    >>> names = CppNames(["param_array"])
    >>> [names.fresh(wanted) for wanted in ("update", "update", "new", "M_PI", "param_array", "\u03b2")]
    ['update', 'update_2', 'new_2', 'M_PI_', 'param_array_2', 'beta']

    >>> from tilestep.backends.cpp.run import block_of
    >>> block_of(1, 4096, 4096), block_of(4096, 3, 3), block_of(1, 4099, 1)
    ((1, 64, 2048), (4096, 3, 3), (1, 256, 1))
    """


def of_runtime() -> None:
    """The package `runtime`.

    >>> import torch
    >>> from tilestep.runtime.gradients import grad_dtype
    >>> weight = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    >>> weight.grad_dtype = torch.float32
    >>> grad_dtype(weight)
    torch.float32

    >>> from tilestep.runtime.hypers import GroupNumbers
    >>> from tilestep.native.table import CHANGED, MOVED, SAME
    >>> group = {"lr": 0.1, "nesterov": False}
    >>> numbers = GroupNumbers(0, group, ["lr", "nesterov"])
    >>> numbers.look() == SAME
    True
    >>> group["lr"] = 0.2
    >>> numbers.look() == MOVED
    True
    >>> group["nesterov"] = True
    >>> numbers.look() == CHANGED
    True

    >>> from tilestep.runtime.kernel_cache import statics_of
    >>> statics_of({"lr": 0.1, "amsgrad": False})
    (('amsgrad', False), ('lr', '<number>'))

    >>> from tilestep.rules.limits import ZClip
    >>> from tilestep.runtime.decision import clip_code
    >>> clip_code(2.0), clip_code(ZClip())
    (2.0, -inf)

    >>> from tilestep.runtime.segment import same_walk
    >>> image = torch.zeros(2, 3, 4, 5)
    >>> same_walk(image, image.clone()), same_walk(image, image.to(memory_format=torch.channels_last))
    (True, False)

    >>> from tilestep.runtime.segment import overlaps_itself
    >>> memory = torch.zeros(9)
    >>> overlaps_itself(memory.as_strided((2, 3), (3, 2))), overlaps_itself(memory.as_strided((2, 3), (2, 2)))
    (False, True)

    >>> from tilestep.runtime.segment import cut_view
    >>> tiles = cut_view([(1, 3, 5), (1, 2, 2)], lambda matrices, rows, columns: (1, 2, 4))
    >>> tiles.tile_tensor.tolist(), tiles.parts.tolist(), tiles.part_counts
    ([0, 0, 0, 0, 1], [[0, 0], [6, 10]], (8, 12))

    >>> from tilestep.runtime.outputs import extent_of
    >>> extent_of(torch.zeros(3, 4)[:, :2])
    10

    >>> import numpy as np
    >>> from tilestep.runtime.outputs import chunks_of
    >>> runs, tensors = chunks_of(np.asarray([5, 0, 2]), 4)
    >>> runs.tolist(), tensors.tolist()
    ([[0, 4, 5], [4, 5, 7]], [[0, 2, 2], [2, 2, 3]])
    """


def of_storage() -> None:
    """The package `storage`.

    >>> from tilestep.storage.blocks import rows_of
    >>> rows_of((1000, 300)), rows_of((64, 32, 3, 3)), rows_of((5000,)), rows_of(())
    (((1000,), 300), ((64,), 288), ((), 5000), ((), 1))

    >>> from tilestep.storage.blocks import lie_in_rows
    >>> lie_in_rows((1000, 300), 1), lie_in_rows((8, 64, 3, 3), 1), lie_in_rows((8, 64, 3, 3), 3)
    (True, True, False)

    >>> from tilestep.storage.blocks import BLOCK, shape_of_entries
    >>> shape_of_entries((1000, 300), BLOCK), shape_of_entries((1000, 300), 2), shape_of_entries((9, 4, 3), 1)
    ((1000, 3), (1000, 150), (9, 4, 3))

    >>> from tilestep.storage.blocks import BLOCK, entries_before
    >>> entries_before((1000, 300), 556, BLOCK), entries_before((1000, 300), 556, 2)
    (5, 278)

    >>> from tilestep.storage.format import dtype_name
    >>> import torch
    >>> dtype_name(torch.bfloat16)
    'bfloat16'

    >>> from tilestep.storage.format import values_of
    >>> from tilestep.storage import Remainder, stored_in
    >>> tensors = {"x": torch.zeros(2, dtype=torch.bfloat16), "remainder_x": torch.zeros(2, dtype=torch.int16)}
    >>> stored_in(Remainder(), tensors, "x", torch.tensor([1.0, 1 / 3]))
    >>> torch.equal(values_of(Remainder(), tensors, "x"), torch.tensor([1.0, 1 / 3]))
    True

    >>> from tilestep.storage.states import state_format
    >>> str(state_format("bfloat16"))
    'bfloat16'
    >>> state_format("int7")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Invalid state_dtype: 'int7'; it must be one of 'float32', 'bfloat16', 'float16', ...

    >>> from tilestep.storage.stochastic import stream_of
    >>> stream_of(0, 0) == stream_of(0, 0), len({stream_of(seed, place) for seed in (0, 1) for place in (0, 1)})
    (True, 4)
    """


def of_norm() -> None:
    """The package `norm`.

    >>> import torch
    >>> from tilestep.norm.table import norm_table
    >>> tensors = [torch.tensor([3.0, 0.0]), torch.tensor([4.0], dtype=torch.bfloat16)]
    >>> table = norm_table(torch.device("cpu"), [2, 1], [tensor.dtype for tensor in tensors])
    >>> addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
    >>> out = torch.empty(1, dtype=torch.float64)
    >>> table.launch(addresses, out, root=True).item()
    5.0

    >>> from tilestep.norm.tiles import order_of
    >>> order_of(2.0), order_of(float("-inf"))
    (<Order.SQUARES: 0>, <Order.SMALLEST: 5>)

    >>> from tilestep.norm.tiles import combine
    >>> combine(torch.tensor([9.0, 16.0], dtype=torch.float64), 2.0)
    tensor(5., dtype=torch.float64)

    >>> from tilestep.norm.tiles import cut
    >>> cut([5, 0, 9], [torch.float32] * 3, 4)[1].tolist()
    [0, 0, 2, 2, 2]

    >>> from tilestep.norm.triton_source import Order, norm_source
    >>> "tl.sqrt" in norm_source([torch.float32], Order.SQUARES)
    True
    """


def of_linalg() -> None:
    """The package `linalg`.

    >>> import torch
    >>> from tilestep.linalg.bases import eigenbasis
    >>> eigenbasis(torch.tensor([[1.0, 0.0], [0.0, 3.0]])).abs()
    tensor([[0., 1.],
            [1., 0.]])

    >>> from tilestep.linalg.bases import orthogonal_basis
    >>> orthogonal_basis(torch.tensor([[0.0, 2.0], [3.0, 1.0]])).abs()
    tensor([[0., 1.],
            [1., 0.]])

    >>> from tilestep.linalg.bases import descending
    >>> square = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> descending(square @ torch.eye(2), torch.eye(2))
    tensor([[0., 1.],
            [1., 0.]])

    >>> from tilestep.runtime.batches import elementwise
    >>> elementwise("maximum", [torch.tensor([1.0, 5.0]), torch.tensor(3.0)])
    tensor([3., 5.])
    """


def of_compat() -> None:
    """The package `compat`.

    >>> import torch
    >>> from tilestep.compat import is_fake
    >>> is_fake(torch.zeros(2))
    False

    >>> from tilestep.compat import fake_mode_is_active
    >>> fake_mode_is_active()
    False

    >>> from tilestep.compat import description
    >>> description(torch.zeros(2)) == description(torch.zeros(2)[:, None].t()[0])
    True

    >>> from tilestep.compat import operation_name
    >>> operation_name(torch.ops.aten.add_.Tensor)
    'add_'

    >>> from tilestep.compat import has_memory
    >>> tensor = torch.zeros(4)[1:]
    >>> has_memory(tensor), has_memory(torch.zeros(4, device="meta")), has_memory(torch.zeros(0))
    (True, False, True)
    >>> _ = tensor.untyped_storage().resize_(0)
    >>> has_memory(tensor)
    False

    >>> from tilestep.compat import resolved
    >>> resolved(torch._neg_view(torch.ones(2))).is_neg(), resolved(torch._efficientzerotensor(2))
    (False, tensor([0., 0.]))

    >>> from tilestep.compat import copy_all
    >>> target = torch.zeros(2)
    >>> copy_all([target], [torch.tensor([1.0, 2.0])])
    >>> target
    tensor([1., 2.])

    >>> from tilestep.compat import zero_all
    >>> values = [torch.ones(2), torch.ones(1)]
    >>> zero_all(values)
    >>> values
    [tensor([0., 0.]), tensor([0.])]

    >>> from tilestep.compat import opaque
    >>> opaque(lambda one, other: one + other)(1, 2)
    3

    >>> from tilestep.compat import UPDATE, marked
    >>> with marked(UPDATE):
    ...     pass

    >>> from tilestep.compat import is_capturing
    >>> is_capturing()
    False

    >>> from tilestep.compat import local_parts
    >>> local_parts([None, 1])
    [None, 1]
    """


def of_cli() -> None:
    """The package `cli`.

    >>> from tilestep.cli.arguments import chosen_device
    >>> chosen_device("cpu")
    device(type='cpu')

    >>> from tilestep.cli.arguments import load_rule
    >>> load_rule("adamw").name
    'AdamW'

    >>> from tilestep.cli.arguments import load_rule, parse_settings
    >>> parse_settings(["amsgrad=true", "betas=(0.8, 0.9)", "lr=1e-2"], load_rule("adamw"))
    {'amsgrad': True, 'betas': (0.8, 0.9), 'lr': 0.01}

    >>> from tilestep.cli.arguments import parse_formats
    >>> parse_formats("int8", "true"), parse_formats("", "")  # doctest: +NORMALIZE_WHITESPACE
    ({'state_dtype': 'int8', 'master_weights': True, 'rounding': 'nearest'},
     {'state_dtype': None, 'master_weights': False, 'rounding': 'nearest'})

    >>> from tilestep.cli.arguments import elements_of
    >>> elements_of("1.2B"), elements_of("350m"), elements_of("12,000")
    (1200000000.0, 350000000.0, 12000.0)

    >>> from tilestep.cli.arguments import mesh_of
    >>> mesh_of("8x4"), mesh_of("16")
    ((8, 4), (16, 1))
    """


def of_bench() -> None:
    """The package `bench`.

    >>> import torch
    >>> from tilestep.bench.measure import trace
    >>> seen = trace(lambda: torch.ones(1000).add(1.0), torch.device("cpu"))
    >>> seen.kernels, seen.calls, seen.peak_bytes
    (0, 2, 8012)

    >>> from tilestep.bench.measure import spread
    >>> spread([4.0, 1.0, 2.0, 3.0, 100.0])
    Spread(median=3.0, low=2.0, high=4.0, count=5)

    >>> from tilestep.bench.measure import Contender, measure
    >>> cpu = torch.device("cpu")
    >>> numbers = torch.ones(1000)
    >>> sum_, broken = measure([Contender("sum", numbers.sum), Contender("no", lambda: 1 / 0)], cpu, rounds=3)
    >>> sum_.wall.count, broken.failure
    (3, 'ZeroDivisionError: division by zero')

    >>> from tilestep.bench.measure import copy
    >>> copy(torch.device("cpu"), 1000).bytes_moved
    2000

    >>> from tilestep.bench.measure import flat_reads
    >>> [contender.bytes_moved for contender in flat_reads(torch.device("cpu"), 1000)]
    [1000, 1000]

    >>> from tilestep.bench.measure import plain_loop
    >>> loop = plain_loop(1000, torch.float32)
    >>> loop is None or loop.bytes_moved == 28000
    True

    >>> from tilestep.bench.measure import loop_over_tensors
    >>> loop = loop_over_tensors([10, 990], torch.float32)
    >>> loop is None or loop.bytes_moved == 28000
    True

    >>> from tilestep.bench.results import Spread, _time
    >>> _time(Spread(median=12.5, low=12.0, high=13.0, count=15))
    '12.5 ±0.5'

    >>> from tilestep.bench.results import device_name
    >>> "core" in device_name(torch.device("cpu"))
    True

    >>> from tilestep.bench.results import __version__, environment
    >>> environment(torch.device("cpu"))["tilestep"] == __version__
    True

    >>> from tilestep.bench.sections import Workload
    >>> Workload("tiny", ((1024,), (976,)), torch.bfloat16).title
    'tiny: 2 bfloat16 tensors, 0.002 M elements'

    >>> from tilestep.bench.sections import gpu_workloads
    >>> [round(workload.elements / 1e6) for workload in gpu_workloads()]
    [131, 1194, 5]

    >>> from tilestep.bench.sections import cpu_workloads
    >>> [(len(workload.shapes), workload.elements) for workload in cpu_workloads()]
    [(200, 50000000), (2000, 16384000), (200, 50000000)]

    >>> from tilestep.bench.sections import llama_of
    >>> llama_of("small llama", 2, 1024, 256, 2816, 32000).title
    'small llama: 21 bfloat16 tensors, 88.09 M elements'

    >>> from tilestep.bench.sections import gpu_workloads, make_parameters
    >>> parameters = make_parameters(gpu_workloads(quick=True)[2], torch.device("cpu"))
    >>> len(parameters), parameters[0].shape == parameters[0].grad.shape
    (50, True)

    >>> from tilestep.bench.sections import adamw_bytes
    >>> parameter = torch.zeros(1000, dtype=torch.bfloat16)
    >>> [adamw_bytes([parameter], clip) for clip in (False, True)]
    [14000, 16000]
    >>> adamw_bytes([parameter], clip=False, master_weights=True)  # fp32 master and moments; parameter only written
    28000

    >>> from tilestep.bench.sections import peers
    >>> [peer.name for peer in peers(torch.device("cpu"), names=["torch fused"])]
    ['torch fused']

    >>> from tilestep.bench.sections import peers, step_of
    >>> fused = peers(torch.device("cpu"), names=["torch fused"])[0]
    >>> parameter = torch.ones(3, requires_grad=True)
    >>> parameter.grad = torch.ones(3)
    >>> step = step_of(fused, [parameter], max_grad_norm=0.5)
    >>> step()
    >>> bool((parameter < 1).all()), round(float(parameter.grad.norm()), 3)
    (True, 0.5)

    >>> from tilestep.bench.tune import Optimizer, has_matrix_work
    >>> has_matrix_work(Optimizer([torch.zeros(2, 2, requires_grad=True)], "SGD"))
    False

    >>> from tilestep.bench.tune import tiled_rules
    >>> {"AdamW", "SGD", "LAMB"} <= {rule.name for rule in tiled_rules()}
    True
    """


def of_kernels() -> None:
    """The package `kernels`.

    >>> from tilestep.kernels.launch import build_threads
    >>> 1 <= build_threads() <= 8
    True

    >>> from tilestep.kernels.cache import content_key
    >>> content_key("a", "b") == content_key("a", "b") != content_key("ab")
    True
    """


def of_descriptions() -> None:
    """The module `planning.describe`.

    >>> from tilestep.planning.describe import spec_for
    >>> from tilestep.rules import registry
    >>> [array.name for array in spec_for(registry["Lion"]).arrays]
    ['param', 'exp_avg']

    >>> import torch
    >>> from tilestep.planning.describe import describe
    >>> from tilestep.rules import registry
    >>> lion = describe(registry["Lion"], dtype=torch.bfloat16)
    >>> lion.bytes_read, lion.bytes_written, lion.launches
    (6, 4, ['lion_scalar_pass_0', 'lion_tile_pass_0'])
    """


def of_demo() -> None:
    """The module `demo`.

    >>> import torch
    >>> from tilestep.bench.demo import GPT, Size
    >>> GPT(Size(layers=1, width=8, heads=2, context=16))(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 256])

    >>> from tilestep.bench.demo import documentation
    >>> bytes(documentation()[:400].tolist()).decode().isprintable() or documentation().numel() > 100_000
    True

    >>> from tilestep.bench.demo import Recipe
    >>> recipe = Recipe(torch.device("cpu"), steps=100)
    >>> [round(recipe.rate(step), 2) for step in (0, 9, 54, 99)]
    [0.1, 1.0, 0.55, 0.1]
    """


def of_timeline() -> None:
    """The module `timeline.timeline`.

    >>> from tilestep.timeline.timeline import gradientless
    >>> import torch
    >>> gradientless(torch.is_grad_enabled)()
    False
    >>> torch.is_grad_enabled()
    True
    """


def of_combinations() -> None:
    """The module `placement.combinations`.

    >>> from tilestep.placement.combinations import refusal
    >>> refusal("offload", ["overlap"])
    "the optimizer is overlapped already: offload it first, with where='gpu', then overlap it"
    >>> refusal("offload", ["shard"])
    ''
    """


def of_memory() -> None:
    """The package `memory`.

    >>> import torch
    >>> from tilestep.memory.offloaded import checksums
    >>> values = torch.tensor([1.0, -1.0, 2.0])
    >>> before = checksums([values])
    >>> _ = values.data.neg_()
    >>> torch.equal(checksums([values]), before)
    False

    >>> from tilestep.memory.copies import sizes_of_chunks
    >>> sizes_of_chunks([2, 0, 5, 1], [False] * 4, room=3)
    [(range(0, 3), range(0, 3)), (range(3, 6), range(2, 3)), (range(6, 8), range(2, 4))]
    >>> sizes_of_chunks([2, 5, 1], [False, True, False], room=3)
    [(range(0, 2), range(0, 1)), (range(2, 7), range(1, 2)), (range(7, 8), range(2, 3))]
    """


def of_optimizer() -> None:
    """The package `optimizer`.

    >>> import torch
    >>> from tilestep.optimizer.states import check_state_dtype
    >>> from tilestep.rules import registry
    >>> check_state_dtype(registry["AdamW"], {"exp_avg": torch.bfloat16, "exp_avg_sq": "float32"})
    >>> check_state_dtype(registry["Lion"], {"momentum": torch.bfloat16})
    Traceback (most recent call last):
    ValueError: Invalid state_dtype: Lion has no state 'momentum' shaped like its parameters; it has 'exp_avg'

    >>> from tilestep.optimizer.states import check_rounding
    >>> check_rounding({"rounding": "up"})
    Traceback (most recent call last):
    ValueError: Invalid rounding: 'up'; it must be 'nearest' or 'stochastic'

    >>> import torch
    >>> from tilestep.optimizer.parameters import check_not_shared
    >>> whole = torch.zeros(4, 4)
    >>> check_not_shared([("left", whole[:, :2]), ("right", whole[:, 2:])])
    >>> check_not_shared([("left", whole[:, :2]), ("row", whole[0])])
    Traceback (most recent call last):
    tilestep.errors.GradientError: row shares memory with left; a parameter can be in the optimizer once

    >>> from tilestep.optimizer.masters import check_choice
    >>> check_choice("remainders")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Invalid master_weights: 'remainders'; it must be False, True, ...

    >>> import torch
    >>> from tilestep.optimizer.masters import master_kind
    >>> master_kind(torch.bfloat16, {"master_weights": "remainder"}).key
    'remainder_param'
    >>> master_kind(torch.float32, {"master_weights": True}) is None
    True

    >>> import torch
    >>> from tilestep.optimizer.masters import check_master
    >>> check_master("a parameter", torch.float32, {"master_weights": True})

    >>> from tilestep.optimizer.groups import deciding_keys, registry
    >>> "differentiable" in deciding_keys(registry["SGD"])
    True

    >>> from tilestep.optimizer.groups import without_defaults
    >>> group = {"lr": 0.1, "max_grad_norm": None, "master_weights": "remainder"}
    >>> without_defaults(group)
    >>> group
    {'lr': 0.1, 'master_weights': 'remainder'}

    >>> from tilestep.optimizer.groups import find_rule
    >>> find_rule("Lion", {}).name
    'Lion'

    >>> import torch
    >>> from tilestep.optimizer.build import spec_of
    >>> import tilestep
    >>> optimizer = tilestep.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    >>> (group,) = optimizer.param_groups
    >>> spec_of(optimizer.rule_of(group), group, group["params"][0]).compute
    torch.float32

    >>> from tilestep.optimizer.optimizer import resolve_optimizer
    >>> import torch, tilestep
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> len(resolve_optimizer("shard", lambda: tilestep.AdamW([weight])).state)
    0
    """


def of_placement() -> None:
    """The package `placement`.

    >>> import torch
    >>> from tilestep.placement import Share
    >>> param = torch.zeros(2, 3)
    >>> Share("", "", param, param[0], 0, {}, 0, param[0], start=2, order=(1, 0)).logical(torch.tensor([0, 1]))
    tensor([1, 4])

    >>> import torch
    >>> from tilestep.placement.local import is_distributed
    >>> is_distributed(torch.zeros(2))
    False

    >>> import torch
    >>> from tilestep.placement.local import as_real
    >>> as_real(torch.tensor([1 + 2j]))
    tensor([[1., 2.]])
    """


def of_planning() -> None:
    """The package `planning`.

    >>> from tilestep.planning import Constants
    >>> Constants.load().gpus_per_node
    8

    >>> from tilestep.planning import footprint
    >>> from tilestep.rules import registry
    >>> sizes = footprint(registry["AdamW"], master_weights=True)
    >>> sizes.state, sizes.moved
    (12.0, 30.0)
    >>> sizes = footprint(registry["AdamW"], master_weights="remainder")
    >>> sizes.state, sizes.moved
    (10.0, 26.0)

    >>> from tilestep.planning import Job, plan
    >>> from tilestep.planning import footprint
    >>> from tilestep.rules import registry
    >>> job = Job(1.2e9, footprint(registry["AdamW"], master_weights=True), shard=8, bucket=2**27)
    >>> chosen = plan(job, Constants.load())
    >>> round(chosen.memory["state"] / 1e9, 2), round(chosen.whole_state / 1e9, 2)
    (1.8, 14.4)

    >>> from tilestep.planning import crossover
    >>> from tilestep.planning import Constants
    >>> few, many = (crossover(ranks, Constants.load()) for ranks in (8, 512))
    >>> few[0] < many[0], few[1] < many[1]
    (True, True)
    """


def of_execution() -> None:
    """The package `execution`.

    >>> from tilestep.execution.zero.buckets import BucketLayout, Slot
    >>> layout = BucketLayout((Slot(0, 0, 40),), section=32, ranks=2)
    >>> layout.piece(layout.slots[0], 0), layout.piece(layout.slots[0], 1)
    ((0, 32), (32, 40))

    >>> from tilestep.execution.zero.buckets import default_cap
    >>> [default_cap(mebibytes * 2**20) / 2**20 for mebibytes in (100, 1600, 16000)]
    [25.0, 100.0, 256.0]
    >>> [round(default_cap(1600 * 2**20, done * 2**20) / 2**20) for done in (0, 100, 200, 400, 1200, 1400)]
    [100, 100, 200, 267, 200, 100]

    >>> from tilestep.execution.zero.buckets import default_sizes
    >>> [round(size / 2**20) for size in default_sizes(1600 * 2**20)]
    [100, 100, 200, 267, 267, 267, 200, 100, 100]

    >>> from tilestep.execution.zero.buckets import Item, plan_buckets
    >>> [layout.slots for layout in plan_buckets([Item(3, 4), Item(20, 4)], ranks=2, cap_bytes=64)]
    [(Slot(index=1, offset=0, numel=20),), (Slot(index=0, offset=0, numel=3),)]

    >>> from tilestep.execution.zero.buckets import Item, padding_advice, plan_buckets
    >>> tiny = [Item(20, 4)] * 64
    >>> padding_advice(tiny, plan_buckets(tiny, ranks=16, cap_bytes=64), 64)[:64]
    'buckets of bucket_cap_mb=6.1e-05 are 92% padding (59.0 KiB): use'

    >>> from tilestep.execution.zero.tensor_piece import blocks_of
    >>> [(offsets, sizes) for offsets, sizes, _ in blocks_of((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]

    >>> import torch
    >>> from tilestep.execution.zero.buckets import memory_order
    >>> memory_order(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (0, 2, 3, 1)
    """


def of_stats() -> None:
    """The package `stats`.

    >>> import torch
    >>> from tilestep.stats import names_of
    >>> names_of([{"params": [torch.zeros(1), torch.zeros(1)]}])[0]
    ['0.0', '0.1']
    """


def of_native() -> None:
    """The package `native`.

    >>> from tilestep.native.host_memory import gigabytes
    >>> gigabytes(14.3e9), gigabytes(2_500)
    ('14.3 GB', '2.5 kB')

    >>> from tilestep.native.host_memory import available
    >>> available()[0] > 0
    True

    >>> import torch
    >>> from tilestep.native.host_memory import HostMemory
    >>> image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    >>> (copy,) = HostMemory(torch.device("cpu")).like([image], [torch.float64])
    >>> copy.dtype, copy.stride() == image.stride()
    (torch.float64, True)

    >>> from tilestep.native.table import CHANGED, MOVED, SAME, Table
    >>> import torch
    >>> tensors = [torch.zeros(3), torch.zeros(2, 2)]
    >>> listed = Table()
    >>> listed.remember(tensors)
    >>> listed.refresh(tensors) == SAME, listed.refresh([torch.zeros(3), torch.zeros(2, 2)]) == MOVED
    (True, True)
    >>> listed.refresh([torch.zeros(3), torch.zeros(4)]) == CHANGED
    True
    >>> state = torch.zeros(2)
    >>> table = Table(states=[state])
    >>> _ = state.add_(1)
    >>> table.look(1) == SAME
    True
    >>> state.data = torch.zeros(2)
    >>> table.look(1) == CHANGED
    True

    >>> import torch
    >>> from tilestep.native.table import survey
    >>> params = [torch.zeros(2, requires_grad=True), torch.zeros(3)]
    >>> survey(params)
    Survey(versions=0, any_gradient=False, trains=b'\\x01\\x00')
    >>> _ = params[1].add_(1)
    >>> params[0].sum().backward()
    >>> survey(params)
    Survey(versions=1, any_gradient=True, trains=b'\\x01\\x00')
    """


def of_tracing() -> None:
    """The package `tracing`.

    >>> from tilestep.tracing import Iteration, lane_events
    >>> from tilestep.tracing.lanes import Lanes
    >>> lanes = Lanes(update=[(1.0, 3.0)], optimizer=[(1.0, 3.0)])
    >>> [event["name"] for event in lane_events([Iteration(0.0, 4.0, lanes)]) if event["ph"] == "X"]
    ['update', 'only the optimizer', 'iteration 0']

    >>> from tilestep.tracing.lanes import union
    >>> union([(4.0, 5.0), (0.0, 2.0)], [(1.0, 3.0), (5.0, 6.0), (9.0, 9.0)])
    [(0.0, 3.0), (4.0, 6.0)]

    >>> from tilestep.tracing.lanes import minus
    >>> minus([(0.0, 10.0)], [(2.0, 3.0), (9.0, 12.0)])
    [(0.0, 2.0), (3.0, 9.0)]

    >>> from tilestep.tracing.lanes import length
    >>> length([(0.0, 4.0), (6.0, 9.0)])
    7.0

    >>> from tilestep.tracing.lanes import covers
    >>> [covers([(0.0, 4.0), (6.0, 9.0)], moment) for moment in (4.0, 5.0, 6.0)]
    [True, False, True]

    >>> from tilestep.tracing.lanes import is_update_kernel
    >>> is_update_kernel("adamw_tile_pass_0"), is_update_kernel("triton_poi_fused_add_0")
    (True, False)

    >>> from tilestep.tracing.lanes import Events
    >>> Events([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "tid": 7}]).calls
    [Call(name='aten::mm', start=1.0, stop=3.0, thread=7, is_range=False)]

    >>> from tilestep.tracing.lanes import Lanes
    >>> Lanes(backward=[(0.0, 10.0)], update=[(8.0, 14.0)], optimizer=[(8.0, 14.0)]).exposed
    [(10.0, 14.0)]
    """

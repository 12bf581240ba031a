"""Ejected files: the same steps as tilestep's on a CPU, nothing but torch imported, formatted, refused by name."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ejected_modules import MATRICES, NAMES, SHAPES, Pair, imported, made, staged
from rank_processes import all_pass
from scripts import all_equal_in_the_interpreter, run_python
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tilestep
from tilestep.cli import main
from tilestep.eject import Request, ejected, ejected_test
from tilestep.errors import RuleError
from tilestep.norm.triton_source import FINISH_BLOCK, tile_shape

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ejected" / "fused_adamw.py"


def test_all_rules_but_those_of_matrices() -> None:
    for name in MATRICES:
        does = "reduces over rows and columns" if name == "Adafactor" else "works on whole matrices"
        with pytest.raises(RuleError, match=f"^{name} {does}.*: use tilestep's optimizer"):
            Request(tilestep.registry[name])


def test_the_guide_lists_what_is_ejected_and_refused() -> None:
    text = " ".join((ROOT / "docs/guide/eject.md").read_text().split())
    assert f"It can eject {', '.join(NAMES)}." in text
    assert f"It refuses {', '.join(sorted(MATRICES))}:" in text


@pytest.mark.parametrize("name", NAMES)
def test_steps_agree_with_tilesteps(name: str, tmp_path: Path) -> None:
    for clip in (False, True):
        pair = Pair(made(name, tmp_path, clip=clip), name, clip=clip)
        pair.step(4)
        assert pair.error() < 4e-6
        list(pair.tensors())  # the states have the same keys


def test_stages_of_kinds_with_other_passes(tmp_path: Path) -> None:
    """Launches go by what is combined over all tensors, not by their places: kinds may have more than others."""
    module = imported(ejected(Request(staged)), tmp_path / "ejected_stages.py")
    stages = [[[launch[0] for launch in stage] for stage in kind.stages] for kind in module.KINDS.values()]
    assert {len(kind) for kind in stages} == {len(module.COMBINED) + 1}
    assert {len(kind[1]) for kind in stages} == {1, 4}
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    grads = [torch.randn_like(param) for param in params]
    first = sum(grad.double().square().sum() for grad in grads)
    second = sum((grad / first).abs().sum() if grad.ndim > 1 else first / (1 + first) for grad in grads)
    right = [param.detach().double() - 0.1 * grad.double() / (1 + second) for param, grad in zip(params, grads)]
    for param, grad in zip(params, grads):
        param.grad = grad
    module.staged(params).step()
    assert all(torch.allclose(param.double(), other, rtol=4e-6) for param, other in zip(params, right))

    @tilestep.rule
    def unlike(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        """Only matrices are summed over all tensors."""
        return param - lr * (tilestep.sum_over_tensors(grad.sum()) if grad.ndim > 1 else 1.0) * grad

    @tilestep.rule
    def turned(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        """Vectors need the second sum first."""
        squares = tilestep.sum_over_tensors(grad.square().sum())
        total = tilestep.sum_over_tensors(grad.abs().sum())
        return param - lr * (squares / total if grad.ndim > 1 else 1 / total * squares)

    for rule in (unlike, turned):
        with pytest.raises(RuleError, match=r"reduces over all tensors in stages that depend on shapes"):
            ejected(Request(rule))


SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True, "maximize": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "AdEMAMix": {"betas": (0.0, 0.999, 0.9999)},
    "ScheduleFreeAdamW": {"inner_momentum": 0.9, "warmup_steps": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_hyperparameters_that_change_kernels(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    pair = Pair(made(name, tmp_path, settings), name, settings=settings)
    pair.step(4)
    assert pair.error() < 4e-6
    plain = made(name, tmp_path)
    with pytest.raises(ValueError, match=r"this file was made for .*; make another: tilestep eject"):
        getattr(plain, name)([torch.nn.Parameter(torch.ones(2))], **settings).step()
        optimizer = getattr(plain, name)([torch.nn.Parameter(torch.ones(2))])
        optimizer.param_groups[0].update(settings)
        optimizer.step()
    if name == "AdamW":
        # In the words of a user; no command makes a file for three.
        for betas in ((0.9, 0.99, 0.999), (0.9, 0.99, None), (0.9,)):
            said = re.escape(f"betas={betas}: this file was made for betas=(0.9, 0.999)")
            with pytest.raises(ValueError, match=f"^{said}$"):
                plain.AdamW([torch.nn.Parameter(torch.ones(2))], betas=betas)


def test_messages_and_commands_are_a_users(tmp_path: Path) -> None:
    module = made("ADOPT", tmp_path)
    with pytest.raises(
        ValueError, match="made for clip_exponent is not None; make another: tilestep eject ADOPT --set"
    ):
        module.ADOPT([torch.nn.Parameter(torch.ones(2))], clip_exponent=None)
    made_with = Request(tilestep.registry["AdamW"], {"eps": 1e-6}, clip=True, master_weights=True, state_dtype="int8")
    own = imported(ejected(made_with), tmp_path / "ejected_with_options.py")
    options = "AdamW --clip --masters true --state-dtype int8 --set eps=1e-06 --set amsgrad=True"
    with pytest.raises(ValueError, match=f"make another: tilestep eject {options}$"):
        own.AdamW([torch.nn.Parameter(torch.ones(2))], amsgrad=True)
    header = ejected(Request(tilestep.registry["AdamW"], {"betas": (0.9, 0.95)})).splitlines()[1]
    assert header == "#     tilestep eject AdamW --set 'betas=(0.9,0.95)'"
    with pytest.raises(ValueError, match=r"^betas=0.9: this file was made for betas=\(0.9, 0.999\)$"):
        made("AdamW", tmp_path).AdamW([torch.nn.Parameter(torch.ones(2))], betas=0.9)


def test_a_rule_of_ones_own_with_tuples_lists_and_sizes(tmp_path: Path) -> None:
    @tilestep.rule
    def own(param: Any, grad: Any, *, lr: Any = 0.1, eps: Any = (None, 1e-3), scales: Any = [2.0, 3.0]) -> Any:  # noqa: B006
        """Divide by the number of elements."""
        largest, smallest = eps
        grad = grad if largest is None else grad.clamp(max=largest)
        return param - lr * scales[0] * (1.0 / param.numel()) * grad - smallest

    module = imported(ejected(Request(own)), tmp_path / "ejected_own.py")
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4,), (0,), (2, 0))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = module.own(params, scales=(4.0, 3.0))  # a list's numbers may be others, as a tuple's
    optimizer.step()
    assert torch.allclose(params[0], torch.full((4,), 1 - 0.1 * 4 / 4 - 1e-3))
    assert [float(optimizer.state[param]["step"]) for param in params] == [1.0, 1.0, 1.0]
    # The file has no formula with the first of these.
    with pytest.raises(ValueError, match=r"made for eps\[0\] is None; make another: tilestep eject own --set"):
        module.own([torch.nn.Parameter(torch.ones(2))], eps=(1.0, 1e-3))


FORMATS: list[dict[str, Any]] = [
    {"master_weights": True},
    {"master_weights": "remainder"},
    {"master_weights": "kahan", "state_dtype": "int8"},
    {"master_weights": "int8"},
    {"state_dtype": "int8"},
    {"state_dtype": "int4"},
    {"state_dtype": "float8_e4m3"},
    {"state_dtype": "scaled_float16"},
]


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_formats_agree_with_tilesteps(options: dict[str, Any], tmp_path: Path) -> None:
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    shapes = [(7,), (64, 130), (5000,), (64, 4097), (4096, 8), (40, 16, 3, 3), ()]
    pair = Pair(made("AdamW", tmp_path, **options), "AdamW", dtype=dtype, shapes=shapes, **options)
    pair.step(3)
    for name, left, right in pair.tensors():
        # A number that lies between two codes may become either, and what is beside a parameter goes with it.
        left, right = left.double(), right.double()
        near = 16.0 if name.startswith("remainder") else 4e-6 * right.abs().clamp(min=1)
        differ = (left - right).abs() > near
        assert differ.double().mean() < 0.01, name


def test_the_interpreter_runs_its_kernels_with_equal_bits() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_eject.py"))


def test_a_bfloat16_model_and_param_groups(tmp_path: Path) -> None:
    pair = Pair(made("AdamW", tmp_path, clip=True), "AdamW", dtype=torch.bfloat16, clip=True)
    for optimizer in (pair.ejected, pair.whole):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5, "max_grad_norm": None})
    pair.step(3)
    assert pair.error() < 0.02
    with pytest.raises(ValueError, match="Invalid lr: -1"):
        pair.ejected.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": -1})
    assert len(pair.ejected.param_groups) == 2
    wrong = torch.nn.Parameter(torch.ones(3).double())
    wrong.grad = torch.ones(3).double()
    pair.ejected.add_param_group({"params": [wrong]})
    before = [param.detach().clone() for param in pair.ours]
    with pytest.raises(
        ValueError, match=r"torch.float64 parameters are not supported; .* torch.float32, torch.bfloat16"
    ):
        pair.ejected.step()
    assert all(map(torch.equal, before, pair.ours))


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"master_weights": "remainder"}], ids=str)
def test_checkpoints_go_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    dtype = torch.bfloat16 if options else torch.float32
    module = made("AdamW", tmp_path, **options)
    pair = Pair(module, "AdamW", dtype=dtype, **options)
    pair.step(2)
    with torch.no_grad():  # the same weights, so that remainders fit them
        for left, right in zip(pair.ours, pair.theirs):
            right.copy_(left)
    saved = copy.deepcopy(pair.ejected.state_dict())
    pair.whole.load_state_dict(saved)
    other = module.AdamW(pair.theirs)
    other.load_state_dict(copy.deepcopy(pair.whole.state_dict()))
    for left, right in zip(pair.ours, pair.theirs):
        for key, value in pair.ejected.state[left].items():
            assert value.dtype is other.state[right][key].dtype
            assert torch.equal(value, other.state[right][key]), key


def test_a_checkpoint_of_torch_continues(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path)
    first = [torch.randn(7, 5), torch.randn(3)]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in first] for _ in range(2))
    referee = torch.optim.AdamW(theirs)
    for param in theirs:
        param.grad = torch.ones_like(param)
    referee.step()
    with torch.no_grad():
        for left, right in zip(ours, theirs):
            left.copy_(right)
    optimizer = module.AdamW(ours)
    optimizer.load_state_dict(copy.deepcopy(referee.state_dict()))
    for param in (*ours, *theirs):
        param.grad = torch.ones_like(param)
    optimizer.step()
    referee.step()
    for left, right in zip(ours, theirs):
        assert torch.allclose(left, right, rtol=4e-6, atol=1e-7)
    wrong = copy.deepcopy(referee.state_dict())
    wrong["state"][0]["momentum_buffer"] = torch.ones(7, 5)
    with pytest.raises(ValueError, match="momentum_buffer"):
        optimizer.load_state_dict(wrong)
    del wrong["state"][0]["momentum_buffer"], wrong["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match=r"states \['exp_avg_sq', 'step'\], the optimizer has \['exp_avg', "):
        optimizer.load_state_dict(wrong)


def test_a_checkpoint_without_a_limit_keeps_the_limit(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path, clip=True)
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    referee = torch.optim.AdamW([param], lr=0.5)
    referee.step()
    optimizer = module.AdamW([{"params": [param], "max_grad_norm": 0.25}])
    optimizer.load_state_dict(referee.state_dict())
    assert optimizer.param_groups[0]["max_grad_norm"] == 0.25 and optimizer.param_groups[0]["lr"] == 0.5
    optimizer.step()


@pytest.mark.parametrize("name", ["ScheduleFreeSGD", "ScheduleFreeAdamW"])
@pytest.mark.parametrize("masters", [False, "remainder"])
def test_weights_to_evaluate(name: str, masters: Any, tmp_path: Path) -> None:
    module = made(name, tmp_path, master_weights=masters)
    dtype = torch.bfloat16 if masters else torch.float32
    pair = Pair(module, name, dtype=dtype, master_weights=masters)
    pair.step(3)
    with torch.no_grad():  # the same training weights
        for left, right in zip(pair.ours, pair.theirs):
            left.copy_(right)
            for key, value in pair.whole.state[right].items():
                pair.ejected.state[left][key] = value.clone()
    pair.ejected.versions = None
    training = [param.detach().clone() for param in pair.ours]
    pair.ejected.eval()
    pair.whole.eval()
    assert all(map(torch.equal, pair.ours, pair.theirs))
    assert not torch.equal(pair.ours[1], training[1])
    with pytest.raises(RuntimeError, match=r"call train\(\) before step"):
        pair.ejected.step()
    saved = copy.deepcopy(pair.ejected.state_dict())
    assert saved["state"][0].keys() == pair.whole.state_dict()["state"][0].keys()
    other = getattr(module, name)([torch.nn.Parameter(param.detach().clone()) for param in pair.ours])
    other.load_state_dict(saved)
    for optimizer in (pair.ejected, other):
        optimizer.eval()
        optimizer.train()
        optimizer.train()
        params = optimizer.param_groups[0]["params"]
        assert all(map(torch.equal, params, training))
        for param, gradient in zip(params, pair.ours):
            param.grad = torch.full_like(gradient, 0.1)
        optimizer.step()
    assert all(map(torch.equal, pair.ours, other.param_groups[0]["params"]))
    if masters:  # what lies beside the parameters still belongs to them
        assert any(state["remainder_param"].any() for state in other.state.values())


def test_other_code_may_not_change_what_kernels_read(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path, clip=True)

    def begun() -> tuple[torch.nn.Parameter, Any]:
        param = torch.nn.Parameter(torch.ones(4, 6))
        param.grad = torch.ones_like(param)
        optimizer = module.AdamW([param])
        optimizer.step()
        return param, optimizer

    def looks(optimizer: Any) -> None:
        """What a step by kernels does before its first launch."""
        found = optimizer.members()
        optimizer.build(found, torch.device("cpu"))
        for tables, members in zip(optimizer.tables, found.values()):
            tables.refresh([module.numbers_of(group) for group in optimizer.param_groups], members)

    for wrong in (torch.ones(4, 6).bfloat16(), torch.ones(1, 6), torch.ones(6, 4).t()):
        param, optimizer = begun()
        before = param.detach().clone()
        optimizer.state[param]["exp_avg"] = wrong
        for step in (optimizer.step, lambda: looks(optimizer)):  # noqa: B023
            with pytest.raises(ValueError, match=r"exp_avg is .*, expected .*delete the state"):
                step()
        assert torch.equal(param, before) and optimizer.state[param]["step"] == 1
    param, optimizer = begun()
    looks(optimizer)
    known = optimizer.known
    param.data = param.data.bfloat16()
    param.grad = torch.ones_like(param)
    assert optimizer.identities(optimizer.members()) != known
    with pytest.raises(ValueError, match=r"exp_avg is \(torch.float32"):
        optimizer.step()
    for replaced in ("step", "exp_avg"):
        param, optimizer = begun()
        looks(optimizer)
        assert optimizer.identities(optimizer.members()) == optimizer.known
        optimizer.state[param][replaced] = optimizer.state[param][replaced].clone()
        assert optimizer.identities(optimizer.members()) != optimizer.known, replaced
    optimizer.build({}, torch.device("cpu"))  # a rank without gradients joins the sum of the norm
    assert optimizer.all_reduce(optimizer.norm).item() == 0
    with pytest.warns(UserWarning, match="duplicate"):
        twice = module.AdamW([param, param])
    with pytest.raises(ValueError, match="more than once"):
        looks(twice)


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(3)
    referee = torch.optim.AdamW(params, lr=0.5, amsgrad=True)
    referee.step()
    optimizer = module.AdamW(params)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"amsgrad=True: this file was made for amsgrad=False; make another: tilestep"):
        optimizer.load_state_dict(referee.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 0.25
    del wrong["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match=r"states \['exp_avg_sq', 'step'\], the optimizer has \['exp_avg', "):
        optimizer.load_state_dict(wrong)
    assert str(optimizer.state_dict()) == str(before)


def test_a_compiled_training_step(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path, clip=True)
    runs = []
    for compiled in (False, True):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = module.AdamW([param], max_grad_norm=0.5)

        def train(param: torch.nn.Parameter = param, optimizer: Any = optimizer) -> None:
            param.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(train, backend="eager") if compiled else train
        for _ in range(3):
            run()
        runs.append(param)
    assert torch.equal(*runs) and runs[0][0] < 1


def test_what_it_refuses(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path)
    gaps = torch.nn.Parameter(torch.ones(4, 6)[:, :3])
    gaps.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match="make it contiguous"):
        module.AdamW([gaps]).step()
    sparse = torch.nn.Parameter(torch.ones(4, 2))
    sparse.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(ValueError, match=r"a gradient is \(torch\.sparse_coo"):
        module.AdamW([sparse]).step()
    assert torch.equal(sparse, torch.ones(4, 2))


def test_transposed_parameters_and_gradients(tmp_path: Path) -> None:
    module = made("AdamW", tmp_path)
    ours = torch.nn.Parameter(torch.randn(5, 7).t())
    theirs = torch.nn.Parameter(ours.detach().clone())
    ours.grad, gradient = torch.randn(7, 5), None
    theirs.grad = gradient = ours.grad.clone()
    module.AdamW([ours]).step()
    tilestep.AdamW([theirs]).step()
    assert gradient is not None and torch.allclose(ours, theirs, rtol=4e-6, atol=1e-7)


def test_other_code_may_write_to_a_parameter_with_remainders(tmp_path: Path) -> None:
    pair = Pair(
        made("AdamW", tmp_path, master_weights="remainder"), "AdamW", dtype=torch.bfloat16, master_weights="remainder"
    )
    pair.step(2)
    with torch.no_grad():
        for param in (*pair.ours, *pair.theirs):
            param.mul_(2)
    pair.step()
    for name, left, right in pair.tensors():
        if name.startswith("remainder"):
            assert ((left.int() - right.int()).abs() > 16).double().mean() < 0.01, name


def test_it_imports_torch_alone(tmp_path: Path) -> None:
    path = tmp_path / "adamw.py"
    path.write_text(ejected(Request(tilestep.registry["AdamW"], clip=True)))
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import adamw, torch; "
        "p = torch.nn.Parameter(torch.ones(3)); o = adamw.AdamW([p], max_grad_norm=1.0); p.grad = torch.ones(3); "
        "o.step(); print('tilestep' in sys.modules, adamw.tl, float(o.grad_norm))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "None", "1.7320508075688772"]


def test_the_norm_has_the_librarys_tiles() -> None:
    text = ejected(Request(tilestep.registry["AdamW"], clip=True))
    small, large = tile_shape(2**28 - 1), tile_shape(2**28)
    assert re.search(rf"{small[0]} if .* < 2\*\*28 else {large[0]}\n", text)
    assert f'"STEP": {small[1]},' in text and small[1:] == large[1:] == (2048, 4)
    assert f"BLOCK={FINISH_BLOCK}," in text


def test_nothing_depends_on_the_machine(tmp_path: Path) -> None:
    text = ejected(Request(tilestep.registry["AdamW"], clip=True))
    assert text == ejected(Request(tilestep.registry["AdamW"], clip=True))
    assert str(ROOT) not in text and "INTERPRETED" not in text
    assert not re.search(r"^\s*(from|import) tilestep", text, re.MULTILINE)


RULE_FILES = [("AdamW", {}), ("Prodigy", {}), ("LARS", {"clip": True}), ("AdamW", {"state_dtype": "int4"})]


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_files_are_formatted(tmp_path: Path) -> None:
    for place, (name, options) in enumerate([*RULE_FILES, *((name, {"clip": True}) for name in NAMES)]):
        request = Request(tilestep.registry[name], **options)
        (tmp_path / f"module_{place}.py").write_text(ejected(request))
        (tmp_path / f"test_module_{place}.py").write_text(ejected_test(request, f"module_{place}"))
    config = ["--config", str(ROOT / "pyproject.toml")]
    for words in (["format", "--diff", *config], ["check", "--select", "E9,F,I", *config]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", ["AdamW", "Prodigy", "Rprop"])
def test_the_command_and_the_tests_that_it_writes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eject", name, "-o", str(tmp_path / "fused_one.py"), "--clip", "--test"])
    assert not end.value.code
    assert capsys.readouterr().out.count("written: ") == 2
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_tests_fail_for_a_wrong_file(tmp_path: Path) -> None:
    request = Request(tilestep.registry["AdamW"])
    right = ejected(request)
    wrong = right.replace("exp_avg_2 = exp_avg + ", "exp_avg_2 = exp_avg + 0.001 * ")
    assert wrong != right
    (tmp_path / "adamw.py").write_text(wrong)
    (tmp_path / "test_adamw.py").write_text(ejected_test(request, "adamw"))
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1 and "test_steps_agree_with_torch" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["AdmaW"], "did you mean AdamW"),
        (["Muon"], "Muon works on whole matrices"),
        (["AdamW", "--masters", "float7"], "masters"),
        (["AdamW", "--state-dtype", "float7"], "state"),
        (["AdamW", "-o", "no-module.py"], "not the name of a Python module"),
    ],
    ids=str,
)
def test_the_command_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eject", *words])
    assert end.value.code
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_it_can_be_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = []
    for words in ([], ["--test"]):
        with pytest.raises(SystemExit):
            main(["eject", "lion", *words])
        texts.append(capsys.readouterr().out)
    assert texts[0] == ejected(Request(tilestep.registry["Lion"]))
    assert texts[1] == ejected_test(Request(tilestep.registry["Lion"]), "lion")
    assert imported(texts[0], tmp_path / "lion.py").Lion


def test_the_example_is_current() -> None:
    request = Request(tilestep.registry["AdamW"], clip=True)
    assert EXAMPLE.read_text() == ejected(request), f"run tilestep eject AdamW --clip --test -o {EXAMPLE}"
    assert EXAMPLE.with_name(f"test_{EXAMPLE.name}").read_text() == ejected_test(request, EXAMPLE.stem)


def test_the_example_is_short() -> None:
    lines = len(EXAMPLE.read_text().splitlines())
    assert lines <= 600
    assert f"AdamW with `--clip` is {lines} lines" in (ROOT / "docs/guide/eject.md").read_text()


def dtensors_are_updated_by_their_parts() -> None:
    """On two ranks: shards of uneven sizes, copies and plain tensors, clipped by one norm; states are DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = [torch.randn(5, 4), torch.randn(3), torch.randn(1, 2), torch.randn(6)]
    grads = [torch.randn_like(tensor) for tensor in whole]
    with tempfile.TemporaryDirectory() as folder:
        module = made("AdamW", Path(folder), clip=True)

    def placed(tensors: list[torch.Tensor]) -> list[Any]:
        places: list[Any] = [Shard(0), Replicate(), Shard(0)]
        return [distribute_tensor(tensor, mesh, [place]) for tensor, place in zip(tensors, places)] + tensors[3:]

    ours = [torch.nn.Parameter(tensor) for tensor in placed([tensor.clone() for tensor in whole])]
    alone = [torch.nn.Parameter(tensor.clone()) for tensor in whole]
    optimizer, other = (module.AdamW(params, max_grad_norm=0.5) for params in (ours, alone))
    for _ in range(3):
        for param, grad in zip(ours, placed(grads)):
            param.grad = grad.clone()
        for param, grad in zip(alone, grads):
            param.grad = grad.clone()
        optimizer.step()
        other.step()
    assert torch.allclose(optimizer.grad_norm, other.grad_norm, rtol=1e-12)
    for left, right in zip(ours, alone):
        full = left.full_tensor() if isinstance(left, DTensor) else left
        assert torch.allclose(full, right, rtol=1e-6, atol=1e-7)
        state = optimizer.state[left]["exp_avg"]
        assert isinstance(state, DTensor) is isinstance(left, DTensor) and state.shape == left.shape
    with tempfile.TemporaryDirectory() as folder:
        lamb = made("LAMB", Path(folder))
    with pytest.raises(ValueError, match="this rule sums over whole tensors"):
        lamb.LAMB([param for param in ours if isinstance(param, DTensor)]).step()


def a_rank_without_gradients_joins_the_norm() -> None:
    """Rank 1 has no gradient, and no state, at its first step; a gradient of other placements is refused."""
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        module = made("AdamW", Path(folder), clip=True)
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    optimizer = module.AdamW([param], max_grad_norm=1.0)
    norms = []
    for step in range(2):
        param.grad = DTensor.from_local(torch.full((2, 3), 1.0 + rank), mesh, [Shard(0)]) if step or not rank else None
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
    assert norms == [6**0.5, 30**0.5], norms
    param.grad = None
    copied = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    copied.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    optimizer.add_param_group({"params": [copied]})
    with pytest.raises(ValueError, match=r"a gradient is .*Partial.*, expected .*Replicate"):
        optimizer.step()


def test_two_ranks() -> None:
    all_pass([dtensors_are_updated_by_their_parts, a_rank_without_gradients_joins_the_norm], ranks=2)


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"state_dtype": "int8"}], ids=str)
def test_kernels_compile_for_a_gpu(options: dict[str, Any], tmp_path: Path) -> None:
    """By Triton on a machine without one: what the interpreter lets pass may not compile."""
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    kinds = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32", torch.float64: "*fp64"}
    module = made("AdamW", tmp_path, clip=True, **options)
    module.load_triton()
    for kind in dict.fromkeys(module.KINDS.values()):
        param = torch.nn.Parameter(torch.ones(8, dtype=kind.buffers[0].arrays[0][1] if options else kind.buffers[0][2]))
        param.grad = torch.ones_like(param)
        optimizer = module.AdamW([param])
        found = optimizer.members()
        optimizer.build(found, param.device)
        (tables,), (members,) = optimizer.tables, found.values()
        tables.refresh([module.numbers_of(group) for group in optimizer.param_groups], members)
        norm = {"TILE": optimizer.norm_tile, "STEP": 2048}
        total = {"BLOCK": 8192, "num_warps": 32}
        tables.tables |= {"partials": optimizer.partials, "partial_count": optimizer.count}
        launches = [*kind.launches, ("norm_tiles", "norm", norm), ("norm_total", "", total)]
        for name, _, launched in launches:
            kernel = getattr(module, name)
            constants = {key: value for key, value in launched.items() if key.isupper()}
            constants.update({key: vars(module)[constants[key]] for key in constants.keys() & {"MATH"}})
            if "ELEMENT" in kernel.arg_names:
                constants["ELEMENT"] = getattr(module.tl, str(param.dtype)[6:])
            signature = {key: kinds[tables.tables[key].dtype] for key in kernel.arg_names if key in tables.tables}
            places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
            source = compiler.ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, places)
            built = compiler.compile(source, target=target, options={"num_warps": launched.get("num_warps", 4)})
            assert "cubin" in built.asm, name

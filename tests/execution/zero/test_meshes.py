"""Three and four ranks: odd sections, and state that is split over some ranks and copied over others."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_on_ranks
from sharded_twins import TINY, Convolutions, Elementwise, Pair, inputs, train, two_groups
from torch.distributed.device_mesh import init_device_mesh

import tilestep
from tilestep.placement import Ranks
from tilestep.placement import reduction as ranks


def clipped(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.1, eps=0.1, max_grad_norm=1.0)  # type: ignore[attr-defined]


def plain(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.1, eps=0.1)  # type: ignore[attr-defined]


def linear_losses(pair: Pair, **tolerances: float) -> None:
    """Losses whose gradients are whole numbers: their sums do not depend on the order in which ranks are added."""
    for _ in range(3):
        data = inputs(1, 7) * 8

        def loss(model: torch.nn.Module, data: torch.Tensor = data) -> torch.Tensor:
            return sum(((index + 1) * weight * data).sum() for index, weight in enumerate(model.weights))

        train(pair, [loss, loss])
        pair.compare(**tolerances)


def sums_of_whole_numbers_are_exact_on_any_number_of_ranks() -> None:
    for options in ({}, {"grad_buffer": "bucket"}, {"overlap_grad_sync": False, "overlap_param_sync": False}):
        for size in (TINY, 25.0):
            pair = Pair(Elementwise(), plain, two_groups, bucket_cap_mb=size, average=False, **options)
            linear_losses(pair)
            pair.compare_states()


def clips_over_all_ranks() -> None:
    pair = Pair(Elementwise(), clipped, bucket_cap_mb=TINY, average=False)
    linear_losses(pair, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_optimizer.grad_norm)  # type: ignore[attr-defined]


def split_over_two_and_copied_over_two() -> None:
    variants: list[dict[str, Any]] = [{}, {"overlap_grad_sync": False}, {"grad_buffer": "bucket"}]
    for place, names in enumerate((("replicate", "shard"), ("dp_shard", "dp_replicate"), None)):
        mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=names)
        for options in variants[place : place + 2]:
            pair = Pair(Elementwise(), plain, two_groups, mesh=mesh, bucket_cap_mb=TINY, **options)
            linear_losses(pair)
            pair.compare_states()
        assert pair.optimizer.execution.sharding.ranks.size == 2 and pair.optimizer.execution.sharding.ranks.copies == 2
        numel = sum(piece.numel() for state in pair.optimizer.state.values() for piece in [state["exp_avg"]])
        total = torch.tensor(float(numel))
        dist.all_reduce(total)
        assert total.item() == 2 * 77
        pair = Pair(Elementwise(), clipped, mesh=mesh, bucket_cap_mb=TINY)
        linear_losses(pair, rtol=1e-6, atol=1e-7)
        whole = Pair(Convolutions(), _lamb, mesh=mesh, bucket_cap_mb=TINY)
        for _ in range(2):
            data = inputs(2, 3, 6, 6)
            train(whole, [lambda model, data=data: model(data).square().sum()])
            whole.compare(rtol=1e-5, atol=1e-6)


@contextmanager
def averaging() -> Iterator[list[str]]:
    """Means in the messages, which gloo does not know; what is averaged by them."""
    calls: list[str] = []

    class Done:
        def wait(self) -> None:
            pass

    def averaged(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if not any(
                isinstance(argument, type(dist.ReduceOp.AVG)) and argument == dist.ReduceOp.AVG
                for argument in arguments
            ):
                return before(*arguments, **options)
            *tensors, _, group = arguments
            calls.append(name)
            before(*tensors, dist.ReduceOp.SUM, group)
            tensors[0].div_(dist.get_world_size(group))
            return Done()

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "can_average", lambda self, flat: True)
        patch.setattr(ranks, "_reduce_scatter", averaged("reduce_scatter", ranks._reduce_scatter))
        patch.setattr(dist, "all_reduce", averaged("all_reduce", dist.all_reduce))
        yield calls


def means_that_come_with_the_messages() -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    variants: list[dict[str, Any]] = [{}, {"grad_buffer": "bucket"}, {"overlap_grad_sync": False}]
    for place, (options, where) in enumerate(itertools.product(variants, (None, mesh))):
        options = {**options, "mesh": where}
        with averaging() as calls:
            pair = Pair(Elementwise(), plain, two_groups, bucket_cap_mb=TINY, **options)
            linear_losses(pair)
            assert set(calls) == ({"reduce_scatter"} if options["mesh"] is None else {"reduce_scatter", "all_reduce"})
        pair.compare_states()
        if place not in (0, 3, 4):  # each variant once, with and without the mesh
            continue
        with averaging() as calls:
            linear_losses(Pair(Elementwise(), plain, bucket_cap_mb=TINY, average=False, **options))
            assert not calls


def _lamb(params: Any) -> tilestep.Optimizer:
    return tilestep.LAMB(params, lr=0.1)  # type: ignore[attr-defined]


def a_bad_value_on_one_copy_skips_everywhere() -> None:
    def make(params: Any) -> tilestep.Optimizer:
        return tilestep.SGD(params, lr=0.1, skip_nonfinite=True)  # type: ignore[attr-defined]

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = Pair(Elementwise(), make, mesh=mesh, bucket_cap_mb=TINY)
    for bad in range(5):
        for mine, theirs in zip(pair.model.parameters(), pair.twin.parameters()):
            mine.grad = torch.full_like(mine, float("inf") if dist.get_rank() == bad else 1.0)
            theirs.grad = mine.grad.clone()
        pair.step()
        pair.compare()
    assert int(pair.optimizer.skipped_steps) == 4


def stages_that_share_a_norm() -> None:
    """Two stages of a model, each on two ranks: clips and skips are those of the whole model."""
    torch.manual_seed(5)
    stages = [Elementwise(4, 9), Elementwise(3, 5)]
    whole = torch.nn.ModuleList(copy.deepcopy(stage) for stage in stages)
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("stage", "dp"))
    place = mesh.get_local_rank("stage")
    mine = stages[place]
    optimizer = tilestep.shard(
        tilestep.AdamW(mine.parameters(), lr=0.1, eps=0.1, max_grad_norm=1.0, skip_nonfinite=True),  # type: ignore[attr-defined]
        mine,
        mesh["dp"],
        bucket_cap_mb=TINY,
        norm_groups=[mesh.get_group("stage")],
    )
    plain_one = tilestep.AdamW(whole.parameters(), lr=0.1, eps=0.1, max_grad_norm=1.0, skip_nonfinite=True)  # type: ignore[attr-defined]
    for step in range(4):
        for stage, model in enumerate(whole):
            for index, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(step * 100 + index)
                drawn = torch.randint(-8, 9, param.shape, generator=generator, device="cpu")
                param.grad = drawn.to(param) * (stage + 1)
        for param, expected in zip(mine.parameters(), whole[place].parameters()):
            param.grad = expected.grad.clone()  # type: ignore[union-attr]
        if step == 2:
            next(whole[1].parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
            if dist.get_rank() == 3:
                next(mine.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
        if step == 1:
            stages_that_share_a_clip(optimizer, mine, whole, mesh.get_group("stage"))
        optimizer.step()
        plain_one.step()
        torch.testing.assert_close(optimizer.grad_norm, plain_one.grad_norm, equal_nan=True)
        for param, expected in zip(mine.parameters(), whole[place].parameters()):
            torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-7)
    assert int(optimizer.skipped_steps) == int(plain_one.skipped_steps) == 1


def stages_that_share_a_clip(optimizer: Any, mine: torch.nn.Module, whole: torch.nn.Module, stages: Any) -> None:
    """Norms and clips of the parameters of several stages, by the optimizer's own functions."""
    firsts = [next(stage.parameters()) for stage in whole]  # type: ignore[operator]
    total = optimizer.grad_norm_of(next(mine.parameters()), process_group=stages)
    torch.testing.assert_close(total, torch.cat([param.grad.flatten() for param in firsts]).norm())  # type: ignore[union-attr]
    alone = optimizer.grad_norm_of(next(mine.parameters()))
    assert float(alone) < float(total)
    clipped = optimizer.clip_grad_norm_(2.0, next(mine.parameters()), process_group=stages)
    torch.testing.assert_close(clipped, torch.nn.utils.clip_grad_norm_(firsts, 2.0))
    torch.testing.assert_close(optimizer.clip_grad_norm_(7.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 7.0))


def states_have_the_same_bits_on_any_mesh() -> None:
    """Clipped steps leave equal parameters, masters and states, from one replica of all shards to all replicas."""
    world, first, device = dist.get_world_size(), {}, torch.get_default_device().type
    for shards in (count for count in range(1, world + 1) if world % count == 0):
        mesh = init_device_mesh(device, (shards, world // shards), mesh_dim_names=("shard", "replicate"))
        for form in ("int8", "bfloat16", None):
            torch.manual_seed(5)
            model = Elementwise(size=333).bfloat16()
            kind: Any = tilestep.AdamW  # type: ignore[attr-defined]
            optimizer = kind(model.parameters(), lr=0.01, max_grad_norm=1.0, master_weights=True, state_dtype=form)
            optimizer = tilestep.shard(optimizer, model, mesh=mesh, bucket_cap_mb=TINY)
            for _ in range(3):
                data = inputs(2, 333, dtype=torch.bfloat16).sign()  # sums of up to eight ranks are exact
                (model(data) * data).sum().backward()
                optimizer.step()
            optimizer.wait()
            saved = optimizer.full_state_dict()
            values = {"weights": torch.cat([param.detach().flatten().cpu() for param in model.parameters()])}
            for number, state in saved["state"].items():
                values |= {f"{number}, {name}": value for name, value in state.items() if torch.is_tensor(value)}
            for name, value in values.items():
                assert torch.equal(first.setdefault((form, name), value), value), (shards, form, name)


THREE = [sums_of_whole_numbers_are_exact_on_any_number_of_ranks, clips_over_all_ranks]
FOUR = [
    split_over_two_and_copied_over_two,
    a_bad_value_on_one_copy_skips_everywhere,
    stages_that_share_a_norm,
    means_that_come_with_the_messages,
    states_have_the_same_bits_on_any_mesh,
]


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_on_ranks(THREE, ranks=3) | run_on_ranks(FOUR, ranks=4)


@pytest.mark.parametrize("check", [*THREE, *FOUR], ids=lambda check: check.__name__)
def test_three_and_four_ranks(check: Callable[[], None], failures: dict[str, str]) -> None:
    assert check.__name__ not in failures, failures[check.__name__]

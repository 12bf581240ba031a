"""A model's parameters sorted for Muon: hidden matrices to it, all others to another rule of the same optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..rules import Rule
from .hyperparameters import find_rule
from .parameters import require_shapes

OUTSIDE = r"(^|\.)((un)?embed\w*|\w*_embed(dings?)?|\w*_emb|wte|wpe|(lm_)?head|classifier)(\.|$)|^output\."
"""Names of parameters that lie at a model's ends: embeddings and heads."""


_RULE = "Muon"


def sorted_for(rule: Rule) -> str:
    """The call that sorts a model's parameters for a rule that takes matrices alone, for messages."""
    return "tilestep.muon_groups(model" + (")" if rule.name == _RULE else ', muon={"rule": ...})')


def muon_groups(
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    muon: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    outside: str | re.Pattern[str] = OUTSIDE,
    rule: Rule | str | None = None,
) -> list[dict[str, Any]]:
    """Sort a model's parameters into two param groups: hidden matrices for Muon, the rest for another rule.

    To the rest go biases, norms and convolutions (whatever has not two dimensions), and matrices at the model's ends:
    those whose name fits `outside`, and in a module also every `Embedding`, and a matrix of an embedding's shape that
    no other has (a head). Frozen parameters are left out. Groups have their parameters' names.

    Args:
        model: a module, or its `named_parameters()`.
        muon: what Muon's group says, such as `{"lr": 0.02}`; or a rule made from Muon, `{"rule": cautious(...)}`.
        others: what the other group says.
        outside: a regular expression that is searched for in the names of matrices.
        rule: the rule of the other group; by default the one that Muon names for it, AdamW.

    Raises:
        ValueError: if no matrix is left for Muon, there is no parameter at all, or nothing says which rule is for the
            rest.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), on what to leave to AdamW.

    Example:
        >>> import tilestep
        >>> linear = torch.nn.Linear
        >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "up": linear(4, 6), "head": linear(4, 9)})
        >>> groups = muon_groups(model, others={"lr": 3e-4})
        >>> [[name for name, _ in group["params"]] for group in groups]
        [['up.weight'], ['embed.weight', 'up.bias', 'head.weight', 'head.bias']]
        >>> optimizer = tilestep.Muon(groups, lr=0.02, adjust_lr_fn="match_rms_adamw")
        >>> [(group["rule"], group["lr"]) for group in optimizer.param_groups]
        [('Muon', 0.02), ('AdamW', 0.0003)]
    """
    named, ends = _named(model)
    inside: list[tuple[str, torch.Tensor]] = []
    rest: list[tuple[str, torch.Tensor]] = []
    for name, param in named:
        if not param.requires_grad:
            continue
        is_matrix = param.dim() == 2 and not param.is_complex()
        is_inside = is_matrix and param not in ends and not re.search(outside, name)
        (inside if is_inside else rest).append((name, param))
    if not inside:
        raise ValueError(f"no matrix is left for Muon: {_why(rest)}")
    first = {"rule": _RULE, **(muon or {}), "params": inside}
    if not rest:
        return [first]
    taken = find_rule(first["rule"], {})
    second = {"rule": rule or taken.fallback, **(others or {}), "params": rest}
    if second["rule"] is None:
        raise ValueError(f"{taken.name} names no rule for the parameters that it does not take; give `rule`")
    return [first, second]


def _named(
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[tuple[str, torch.Tensor]], set[torch.Tensor]]:
    """Named parameters, and those of them that a module's structure shows to be embeddings and heads."""
    named: list[tuple[str, torch.Tensor]] = list(
        model.named_parameters() if isinstance(model, torch.nn.Module) else model
    )
    require_shapes("muon_groups()", named)
    if not isinstance(model, torch.nn.Module):
        return named, set()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    ends: set[torch.Tensor] = {module.weight for module in model.modules() if isinstance(module, kinds)}
    for shape in {table.shape for table in ends}:
        alike = [param for _, param in named if param.shape == shape and param not in ends]
        ends.update(alike if len(alike) == 1 else ())
    return named, ends


def _why(rest: list[tuple[str, torch.Tensor]]) -> str:
    matrices = [name for name, param in rest if param.dim() == 2]
    if not matrices:
        return "no parameter that trains has two dimensions"
    shown = ", ".join(matrices[:5]) + (", ..." if len(matrices) > 5 else "")
    return f"{shown} are taken for embeddings and heads; give another `outside`"

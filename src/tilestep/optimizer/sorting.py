"""Sort a model's parameters for a rule of matrices: hidden matrices, stacks and convolutions, and the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..rules import Rule
from .groups import find_rule
from .parameters import check_expression, require_shapes, shortened

OUTSIDE = (
    r"(^|\.)((un)?embed\w*|\w*_embed(s|dings?)?|\w*_emb|wte|wpe|\w*bias_table|(lm_)?head|classifier)(\.|$)"
    r"|^(module\.|_orig_mod\.)*(output(_layer)?|proj_out)\."
    r"|(^|\.)(\w*router\w*|\w*expert_gate|gating\w*|A_log)(\.|$)|(^|[._])bias$"
)
"""Names of embeddings and heads at the ends of a model, of routers, experts' biases and Mamba's decay rates."""

_GATE = re.compile(r"(?:^|(.*)\.)gate(?:\.|$)")
"""The name of a router if its module also has experts, or of a hidden matrix in a gated feed-forward layer."""

STACKS = r"(^|\.)\w*experts?(\.|_|$)"
"""Names of parameters that are stacks of experts' matrices."""

HEADS = (
    r"(^|[._])((q|k|v|qkv|query|key|value|query_key_value|c_attn)(_proj|_lin)?|w(q|k|v|qkv)|to_(q|k|v|qkv))(_weight|\.|$)"
    r"|(^|\.)in_proj_weight$"
)
"""Names of projections to heads: each head is a block of rows."""

_FEWEST = 4  # channels: a convolution of at most this many is at the model's input, and a single channel is not mixed

_RULE = "Muon"


def sorted_for(rule: Rule) -> str:
    """The call that sorts a model's parameters for a rule of matrices, for messages."""
    return "tilestep.muon_groups(model" + (")" if rule.name == _RULE else ', muon={"rule": ...})')


class SortedGroups(list[dict[str, Any]]):
    """Param groups that report which parameters, and what share of the elements, each rule gets.

    Example:
        >>> linear = torch.nn.Linear(8, 8)
        >>> groups = muon_groups(linear)
        >>> groups.shares
        {'Muon': 0.8888888888888888, 'AdamW': 0.1111111111111111}
        >>> print(groups)
        Muon: 88.9% of 72 elements, weight
        AdamW: 11.1%, bias
    """

    left: Mapping[str, tuple[int, ...]] = {}
    """The shapes of stacks and convolutions that the rule of matrices does not get, by name."""

    @property
    def shares(self) -> dict[str, float]:
        """The share of the elements that each rule gets."""
        names = [getattr(group["rule"], "name", group["rule"]) for group in self]
        return {name: count / max(sum(self._counts), 1) for name, count in zip(names, self._counts)}

    @property
    def _counts(self) -> list[int]:
        return [sum(param.numel() for _, param in group["params"]) for group in self]

    def __str__(self) -> str:
        lines, total = list[str](), sum(self._counts)
        for (name, share), group in zip(self.shares.items(), self, strict=True):
            of = f" of {total:,} elements" if not lines else ""
            lines.append(f"{name}: {share:.1%}{of}, {', '.join(_merge_numbered([own for own, _ in group['params']]))}")
        if self.left:
            shown = ", ".join(f"{name} {shape}" for name, shape in self.left.items())
            lines.append(f"stacks and convolutions that {next(iter(self.shares))} does not get: {shown}")
        return "\n".join(lines)


def _merge_numbered(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in numbers."""
    counts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        counts[re.sub(r"\d+", "*", name)].append(name)
    return [f"{len(own)} x {alike}" if len(own) > 1 else own[0] for alike, own in counts.items()]


def muon_groups(
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    *,
    muon: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    outside: str | re.Pattern[str] = OUTSIDE,
    stacks: str | re.Pattern[str] = STACKS,
    heads: bool = False,
    rule: Rule | str | None = None,
) -> SortedGroups:
    """Sort a model's parameters into two param groups: hidden matrices for Muon, the rest for another rule.

    Muon gets matrices, stacks of experts' matrices (found by name), and convolutions, with all dimensions but the first
    flattened. The rest are biases, norms, matrices at the model's ends and routers of experts: every name that matches
    `outside`, a `gate` in a module with experts, and in a module also every `Embedding` and its head, the only other
    matrix with the embedding's shape; convolutions of at most four input channels, at the model's input or depthwise;
    and other tensors of three or more dimensions. Frozen parameters are left out. Groups include the parameters' names.

    Args:
        model: a module, or its `named_parameters()`.
        muon: hyperparameters of Muon's group, such as `{"lr": 0.02}`; or a rule derived from Muon,
            `{"rule": cautious(...)}`.
        others: hyperparameters of the other group.
        outside: a regular expression, searched in the names of parameters.
        stacks: a regular expression, searched in the names of parameters with more than two dimensions.
        heads: whether each head of a projection to queries, keys or values is a separate matrix. Projections are found
            by name, such as `q_proj`, `wk` or `qkv`, and the size of a head by the attributes of their module:
            `head_dim`, or the columns over `num_heads`, `n_heads` or `n_head`.
        rule: the rule of the other group; by default Muon's `fallback`, AdamW.

    Returns:
        A list of groups; printed, it shows which parameters each rule gets; `shares` gives the share of the elements.

    Raises:
        ValueError: if no matrix is left for Muon, if there are no parameters or names, if the rest has no rule, if
            `heads` finds none, or for invalid regular expressions.

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
    named = list(model.named_parameters() if isinstance(model, torch.nn.Module) else model)
    if any(isinstance(one, torch.Tensor) for one in named):
        raise ValueError("muon_groups() sorts by names: pass the model, or its named_parameters()")
    if not isinstance(heads, bool):
        raise ValueError(f"Invalid heads: {heads!r}; it must be True or False; pass numbers as the optimizer's heads")
    check_expression("outside", outside)
    check_expression("stacks", stacks)
    require_shapes("muon_groups()", named)
    modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    ends = _routers(named) | _end_matrices(modules.values(), named)
    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    windows = {module.weight for module in modules.values() if isinstance(module, convolutions)}
    inside, rest, flat = list[tuple[str, torch.Tensor]](), list[tuple[str, torch.Tensor]](), list[str]()
    left: dict[str, tuple[int, ...]] = {}
    for name, param in named:
        if not param.requires_grad:
            continue
        is_window = param.dim() > 2 and (param in windows or max(param.shape[2:]) <= _WINDOW)
        is_convolution = is_window and param.size(1) > _FEWEST
        is_stack = param.dim() > 2 and not is_window and bool(re.search(stacks, name))
        holds_matrices = (param.dim() == 2 or is_stack or is_convolution) and not param.is_complex()
        is_inside = holds_matrices and param not in ends and not re.search(outside, name)
        (inside if is_inside else rest).append((name, param))
        if is_inside and is_convolution:
            flat.append(name)
        elif not is_inside and param.dim() > 2:
            left[name] = tuple(param.shape)
    if not inside:
        matrices = shortened([name for name, param in rest if param.dim() == 2])
        why = f"{matrices} are treated as embeddings, heads or routers; pass another `outside`"
        why = why if matrices else "no trainable parameter has two dimensions"
        raise ValueError(f"no matrix is left for Muon: {why}")
    found: dict[str, Any] = {"flatten": {_exact_pattern(flat): True}} if flat else {}
    if heads:
        found["heads"] = _heads(modules, inside)
    first = {"rule": _RULE, **found, **(muon or {}), "params": inside}
    groups = SortedGroups([first])
    groups.left = left
    if not rest:
        return groups
    taken = find_rule(first["rule"], {})
    second = {"rule": rule or taken.fallback, **(others or {}), "params": rest}
    if second["rule"] is None:
        raise ValueError(f"{taken.name} has no fallback rule for the remaining parameters; pass `rule`")
    groups.append(second)
    return groups


_WINDOW = 7  # largest window of a convolution: sides after the first two dimensions


def _exact_pattern(names: Iterable[str]) -> str:
    """A pattern that matches exactly these names."""
    return f"^({'|'.join(map(re.escape, names))})$"


def _routers(named: list[tuple[str, torch.Tensor]]) -> set[torch.Tensor]:
    """Parameters of modules called `gate` whose parent also has experts or a stack of matrices."""
    gates = [(match[1] or "", param) for name, param in named if (match := _GATE.match(name))]
    parents, with_experts = {path for path, _ in gates}, set()
    for name, param in named if parents else ():
        parts = name.split(".")
        for depth in range(len(parts)):
            is_stack = param.dim() > 2 and depth == len(parts) - 1
            if (path := ".".join(parts[:depth])) in parents and (is_stack or "expert" in ".".join(parts[depth:])):
                with_experts.add(path)
    return {param for path, param in gates if path in with_experts}


def _end_matrices(modules: Iterable[torch.nn.Module], named: Iterable[tuple[str, torch.Tensor]]) -> set[torch.Tensor]:
    """Embeddings, and the head with the shape of an embedding, if there is exactly one."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    ends: set[torch.Tensor] = {module.weight for module in modules if isinstance(module, tables)}
    for shape in {table.shape for table in ends}:
        alike = [param for _, param in named if param.shape == shape and param not in ends]
        ends.update(alike if len(alike) == 1 else ())
    return ends


def _heads(modules: Mapping[str, torch.nn.Module], inside: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Patterns of the projections to heads, with their numbers of heads."""
    by_count: dict[int, list[str]] = defaultdict(list)
    for name, param in inside:
        if param.dim() != 2 or not re.search(HEADS, name):
            continue
        # The projection itself, or the attention module around it, has the size of a head.
        path = name.split(".")[:-1]
        owners = [modules.get(".".join(path[:stop])) for stop in range(len(path), -1, -1)][:2]
        if type(owners[0]).__name__ == "Conv1D":
            continue  # of transformers: its rows are inputs
        size = next((size for owner in owners if (size := _size_of_head(owner, param.size(1)))), 0)
        if size and param.size(0) % size == 0:
            by_count[param.size(0) // size].append(name)
    if not by_count:
        raise ValueError(
            "heads=True finds no projection to heads in a module with their size (head_dim or num_heads); pass "
            'heads={"q_proj": ...} to the optimizer'
        )
    return {_exact_pattern(names): count for count, names in by_count.items()}


def _size_of_head(module: Any, columns: int) -> int:
    size = getattr(module, "head_dim", None)
    if isinstance(size, int):
        return size
    counts = (getattr(module, name, None) for name in ("num_heads", "n_heads", "n_head"))
    count = next((count for count in counts if isinstance(count, int) and count > 0), 0)
    return columns // count if count and columns % count == 0 else 0

"""Which of a model's parameters go to Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilestep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.output = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)


class Model(nn.Module):
    def __init__(self, head: str, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.places = nn.Embedding(16, 16)
        self.patches = nn.Conv2d(3, 16, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        setattr(self, head, nn.Linear(16, 50, bias=False))
        if tied:
            getattr(self, head).weight = self.tokens.weight


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


HIDDEN = [
    f"layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in ("attention.in_proj", "attention.out_proj", "output")
]


@pytest.mark.parametrize(("head", "tied"), [("lm_head", False), ("lm_head", True), ("vocabulary", False)])
def test_matrices_between_the_ends_go_to_muon(head: str, tied: bool) -> None:
    model = Model(head, tied)
    muon, others = tilestep.muon_groups(model)
    assert [name.replace("in_proj_weight", "in_proj.weight") for name in names(muon)] == HIDDEN
    assert (muon["rule"], others["rule"]) == ("Muon", "AdamW")
    every = {name for name, _ in model.named_parameters()}
    assert {*names(muon), *names(others)} == every and len(names(muon)) + len(names(others)) == len(every)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = tilestep.Muon([muon, others], lr=0.01)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(param.detach(), before_step) for param, before_step in zip(model.parameters(), before))


def test_names_alone_will_do() -> None:
    named = [
        ("embed_tokens.weight", torch.ones(9, 4)),
        ("up.weight", torch.ones(4, 4)),
        ("lm_head.weight", torch.ones(9, 4)),
    ]
    params = [(name, nn.Parameter(value)) for name, value in named]
    muon, others = tilestep.muon_groups(params, muon={"lr": 0.02}, others={"lr": 1e-3}, rule="Lion")
    assert names(muon) == ["up.weight"] and muon["lr"] == 0.02
    assert names(others) == ["embed_tokens.weight", "lm_head.weight"] and others["rule"] == "Lion"


def test_tables_heads_and_decay_rates_are_known_by_name() -> None:
    left = (
        "backbone.layers.0.mixer.A_log",  # Mamba
        "layers.0.attn.relative_position_bias_table",  # Swin
        "value_embeds.0.weight",
        "output_layer.weight",  # Megatron
        "module.output_layer.weight",
        "_orig_mod.output.weight",
        "proj_out.weight",  # Whisper
    )
    inside = ("layers.0.output.weight", "layers.0.output_layer.weight", "layers.0.proj_out.weight", "dt_proj.weight")
    groups = tilestep.muon_groups([(name, nn.Parameter(torch.ones(6, 4))) for name in (*left, *inside)])
    assert (tuple(names(groups[0])), tuple(names(groups[1]))) == (inside, left)


def test_a_rule_made_from_muon_says_too_who_takes_the_rest() -> None:
    model = Model("lm_head")
    careful = tilestep.cautious(tilestep.registry["Muon"])
    first, others = tilestep.muon_groups(model, muon={"rule": careful})
    assert first["rule"] is careful and others["rule"] == careful.fallback == tilestep.registry["Muon"].fallback
    with pytest.raises(ValueError, match="SGD has no fallback rule for the remaining parameters; pass `rule`"):
        tilestep.muon_groups(model, muon={"rule": "SGD"})
    assert tilestep.muon_groups(model, muon={"rule": "SGD"}, rule="Lion")[1]["rule"] == "Lion"


def test_frozen_parameters_are_left_out_and_a_pattern_of_one_s_own_decides() -> None:
    model = Model("lm_head")
    model.layers[0].requires_grad_(False)
    muon, others = tilestep.muon_groups(model, outside=r"^layers\.1\.output|head")
    assert names(muon) == ["layers.1.attention.in_proj_weight", "layers.1.attention.out_proj.weight"]
    assert "layers.1.output.weight" in names(others) and not any(name.startswith("layers.0") for name in names(others))


def test_a_gate_is_a_router_only_where_there_are_experts() -> None:
    """Mixtral, DeepSpeed's MoE and stacks have routers of that name; gated feed-forward layers have a hidden matrix."""

    def inside(shapes: dict[str, tuple[int, ...]]) -> list[str]:
        named = [(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]
        return names(tilestep.muon_groups(named)[0])

    dense = {f"layers.{layer}.mlp.{name}.weight": (12, 8) for layer in range(2) for name in ("gate", "up")}
    assert inside(dense) == list(dense) and inside({"gate": (8, 8)}) == ["gate"]
    experts = {f"moe.experts.{expert}.{name}.weight": (8, 8) for expert in range(2) for name in ("gate", "up")}
    for routed in ({"moe.gate.weight": (2, 8)}, {"moe.gate.wg.weight": (2, 8)}):
        assert inside({**dense, **routed, **experts}) == [*dense, *experts]
    stacks = {"ffn.gate": (2, 8), "ffn.experts_up": (2, 8, 8), "other.gate": (2, 8), "other.up": (2, 9, 8)}
    assert inside({**dense, **stacks}) == [*dense, "ffn.experts_up"]
    # The stack has another parent: a convolution next to a gated layer says nothing of it.
    assert inside({"layer.gate.weight": (8, 8), "layer.mixer.kernel": (2, 9, 8)}) == ["layer.gate.weight"]


class Attention(nn.Module):
    """As in transformers: several query heads for each key head, and a fused projection beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(16, 8, bias=False), nn.Linear(16, 16, bias=False)


class Fused(nn.Module):
    """As in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)


class Experts(nn.Module):
    """As in transformers and torchtitan: stacks of matrices, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3, bias=False)
        self.shared_expert_gate = nn.Linear(16, 1, bias=False)
        self.experts = nn.ParameterDict(
            {"gate_up_proj": torch.zeros(3, 24, 16), "down_proj": torch.zeros(3, 16, 12), "bias": torch.zeros(3, 16)}
        )
        self.gate_proj = nn.Linear(16, 12, bias=False)  # of a shared expert: a hidden matrix


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.zeros(1, 30, 16))
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv1d(8, 6, 9)])
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": kind(), "moe": Experts()}) for kind in (Attention, Fused)])
        self.multihead = nn.MultiheadAttention(16, 4)
        self.lm_head = nn.Linear(16, 50, bias=False)


def test_stacks_heads_and_convolutions_are_found_and_what_is_left_is_named() -> None:
    model = Mixture()
    groups = tilestep.muon_groups(model, heads=True, muon={"lr": 0.02})
    muon, others = groups
    inside = set(names(muon))
    experts = {f"layers.{layer}.moe.{name}" for layer in range(2) for name in ("gate_proj.weight",)}
    stacks = {f"layers.{layer}.moe.experts.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")}
    heads = {"layers.0.attn.q_proj.weight": 4, "layers.0.attn.k_proj.weight": 2, "layers.0.attn.v_proj.weight": 2}
    heads |= {"layers.1.attn.qkv.weight": 6, "multihead.in_proj_weight": 12}
    plain = {"layers.0.attn.o_proj.weight", "layers.1.attn.proj.weight", "multihead.out_proj.weight"}
    assert inside == experts | stacks | set(heads) | plain | {"blocks.0.weight", "blocks.2.weight"}
    assert groups.left == {"positions": (1, 30, 16), "stem.weight": (8, 3, 3, 3), "blocks.1.weight": (8, 1, 3, 3)}
    routers = {"layers.0.moe.gate.weight", "layers.1.moe.shared_expert_gate.weight"}
    assert routers | {"layers.0.moe.experts.bias"} <= set(names(others))  # of two dimensions both
    optimizer = tilestep.Muon(groups)
    entries = optimizer.fitting_plan(ahead=True).engines[0].entries
    rows = {entry.share.label.split("(")[1][:-1]: entry.shape for entry in entries if entry.holds is not None}
    assert rows == {
        **{name: (model.get_parameter(name).size(0) // count, 16) for name, count in heads.items()},
        **{name: tuple(model.get_parameter(name).shape[-2:]) for name in stacks},
        "blocks.0.weight": (8, 72),
        "blocks.2.weight": (6, 72),
    }


def test_printed_groups_say_what_each_rule_gets() -> None:
    model = Mixture()
    groups = tilestep.muon_groups(model)
    total = sum(param.numel() for param in model.parameters())
    inside = sum(param.numel() for _, param in groups[0]["params"])
    assert groups.shares == {"Muon": inside / total, "AdamW": 1 - inside / total}
    first, second, third = str(groups).splitlines()
    assert first.startswith(f"Muon: {inside / total:.1%} of {total:,} elements, ")
    assert "2 x layers.*.moe.experts.gate_up_proj" in first and "multihead.in_proj_weight" in first
    assert second.startswith(f"AdamW: {1 - inside / total:.1%}, ") and "2 x layers.*.moe.gate.weight" in second
    assert third == (
        "stacks and convolutions that Muon does not get: positions (1, 30, 16), stem.weight (8, 3, 3, 3), "
        "blocks.1.weight (8, 1, 3, 3)"
    )
    assert groups[0]["flatten"] and "heads" not in groups[0]


def test_patterns_of_one_s_own_for_stacks_and_heads() -> None:
    model = Mixture()
    muon, _ = tilestep.muon_groups(model, stacks="positions", muon={"heads": {"q_proj": 2}})
    assert "positions" in names(muon) and "layers.0.moe.experts.down_proj" not in names(muon)
    assert muon["heads"] == {"q_proj": 2}
    with pytest.raises(ValueError, match="heads=True finds no projection to heads in a module with their size"):
        tilestep.muon_groups(nn.Sequential(nn.Linear(4, 4)), heads=True)
    named = [
        ("conv.weight", nn.Parameter(torch.ones(6, 5, 3, 3))),
        ("first.weight", nn.Parameter(torch.ones(6, 3, 3, 3))),
    ]
    muon, others = tilestep.muon_groups(named)
    assert (names(muon), names(others)) == (["conv.weight"], ["first.weight"])


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter has two dimensions"):
        tilestep.muon_groups(nn.LayerNorm(4))
    with pytest.raises(
        ValueError, match=r"0\.weight are treated as embeddings, heads or routers; pass another `outside`"
    ):
        tilestep.muon_groups(nn.Sequential(nn.Embedding(3, 4)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outside": "("}, r"Invalid outside: '\(' is not a regular expression: missing \)"),
        ({"stacks": 3}, "Invalid stacks: 3 is not a regular expression"),
        ({"heads": {"weight": 2}}, "Invalid heads: .* must be True or False; .* the optimizer's heads"),
        ({"heads": 2}, "Invalid heads: 2"),
    ],
)
def test_what_cannot_sort_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tilestep.muon_groups(torch.nn.Linear(4, 4), **given)


def test_parameters_without_names_are_refused() -> None:
    with pytest.raises(ValueError, match="sorts by names: pass the model, or its named_parameters"):
        tilestep.muon_groups(torch.nn.Linear(4, 4).parameters())  # type: ignore[arg-type]

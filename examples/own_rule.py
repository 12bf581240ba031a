"""Write an update rule, have it tested, and train with it beside AdamW.

    python examples/own_rule.py

The rule is Adam without its first moment, with a slow average of the weights that pulls them back: no rule of a
paper, but a few lines that show state, a step count and hyperparameters. It becomes one kernel over all parameters.
"""

from __future__ import annotations

import torch

import tilestep
from small_gpt import GPT, Text, arguments, draw, progress
from tilestep.checking import check_rule


@tilestep.rule(
    ranges={"lr": tilestep.at_least(0), "beta": tilestep.between(0, 1), "pull": tilestep.between(0, 1)},
    states={"slow": tilestep.State("param")},
)
def pulled(param, grad, exp_avg_sq, slow, *, lr=1e-3, beta=0.99, eps=1e-8, pull=1e-3, step):
    """Normalized gradients, and a pull towards a slow average of the weights.

    Equations (t is the step count from 1):
        v <- beta * v + (1 - beta) * g^2
        p <- p - lr * g / (sqrt(v / (1 - beta^t)) + eps) + pull * (s - p)
        s <- s + pull * (p - s)
    """
    exp_avg_sq = beta * exp_avg_sq + (1 - beta) * grad * grad
    normalized = grad / ((exp_avg_sq / (1 - beta**step)).sqrt() + eps)
    param = param - lr * normalized + pull * (slow - param)
    return param, exp_avg_sq, slow + pull * (param - slow)


def train(optimizer_of, device: torch.device, steps: int, title: str) -> list[float]:
    """Train from the same weights on the same text; return the loss of each step."""
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer, text, losses = optimizer_of(model.parameters()), Text(device), []
    for step in range(1, steps + 1):
        loss = model(text.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        progress(step, steps, title, loss=losses[-1])
    return [float(loss) for loss in losses]


def main() -> None:
    parser = arguments(__doc__, "own_rule.png", steps=120)
    parser.add_argument("--check", action="store_true", help="test every kernel of the rule in float64 first; a minute")
    options = parser.parse_args()

    # Called on tensors, a rule is its own reference.
    weight, gradient = torch.ones(3, dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64)
    new_weight, *_ = pulled(weight, gradient, torch.zeros_like(weight), weight.clone(), lr=0.1, step=1)
    print(f"a first step of 0.1 from 1 against a gradient of 0.5 leads to {float(new_weight[0]):.4f}")

    if options.check:
        verdicts = check_rule(pulled, interpret=False)
        for verdict in verdicts:
            print(verdict)
        if any(verdict.passed is False for verdict in verdicts):
            raise SystemExit(1)

    curves = {
        "AdamW": train(lambda ps: tilestep.AdamW(ps, lr=1e-3), options.device, options.steps, "AdamW"),
        "pulled": train(lambda ps: tilestep.Optimizer(ps, pulled, lr=1e-3), options.device, options.steps, "pulled"),
    }
    draw(curves, options.picture, f"a rule of one's own beside AdamW, on {options.device}")


if __name__ == "__main__":
    main()

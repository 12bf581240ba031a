"""Rules of papers as their authors' repositories spell them: `lerp`, `addcmul_`, `addcdiv_`, in place or not.

Where an author writes `if` on the step or on data, `tilestep.where` stands for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import tilestep
from tilestep import State


@tilestep.rule
def adabelief(param, grad, exp_avg, exp_avg_var, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-16, weight_decay=1e-2, step):
    """Zhuang et al., "AdaBelief Optimizer" (NeurIPS 2020)."""
    beta1, beta2 = betas
    param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    residual = grad - exp_avg
    exp_avg_var.lerp_(residual * residual, 1 - beta2).add_(eps)
    denominator = (exp_avg_var.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


@tilestep.rule
def yogi(param, grad, exp_avg, exp_avg_sq, *, lr=1e-2, betas=(0.9, 0.999), eps=1e-3, step):
    """Zaheer et al., "Adaptive Methods for Nonconvex Optimization" (NeurIPS 2018)."""
    beta1, beta2 = betas
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    squared = grad.square()
    exp_avg_sq = exp_avg_sq.addcmul(torch.sign(exp_avg_sq - squared), squared, value=-(1 - beta2))
    denominator = (exp_avg_sq.sqrt() / (1 - beta2**step).sqrt()).add_(eps)
    return param.addcdiv(exp_avg, denominator, value=-lr / (1 - beta1**step)), exp_avg, exp_avg_sq


@tilestep.rule
def diffgrad(param, grad, exp_avg, exp_avg_sq, previous_grad, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, step):
    """Dubey et al., "diffGrad" (IEEE TNNLS 2020)."""
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad * grad, 1 - beta2)
    friction = torch.sigmoid((previous_grad - grad).abs())
    previous_grad.copy_(grad)
    denominator = exp_avg_sq.sqrt().add_(eps)
    step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    param.addcdiv_(exp_avg * friction, denominator, value=-step_size)


@tilestep.rule(states={"x0": State("param")})
def madgrad(param, grad, grad_sum_sq, s, x0, *, lr=1e-2, momentum=0.9, weight_decay=0.0, eps=1e-6, step):
    """Defazio and Jelassi, "Adaptivity without Compromise" (JMLR 2022)."""
    lamb = (lr + eps) * math.sqrt(step)
    grad = grad + weight_decay * param
    grad_sum_sq.addcmul_(grad, grad, value=lamb)
    rms = grad_sum_sq.pow(1 / 3).add_(eps)
    s.add_(grad, alpha=lamb)
    z = x0.addcdiv(s, rms, value=-1)
    param.lerp_(z, 1 - momentum)


@tilestep.rule
def pnm(param, grad, positive, negative, *, lr=1e-2, momentum=0.9, beta0=1.0, step):
    """Xie et al., "Positive-Negative Momentum" (ICML 2021); `if step % 2 == 1` exchanges the two momenta."""
    odd = step % 2 == 1
    new = torch.where(odd, positive, negative).lerp(grad, 1 - momentum**2)
    old = torch.where(odd, negative, positive)
    noise_norm = math.sqrt((1 + beta0) ** 2 + beta0**2)
    update = (1 + beta0) * new - beta0 * old
    param.sub_(lr * update / noise_norm)
    positive.copy_(tilestep.where(odd, new, positive))
    negative.copy_(tilestep.where(odd, negative, new))


@tilestep.rule(states={"row": State(shape="row"), "col": State(shape="column"), "row_res": State(shape="row"),
                       "col_res": State(shape="column")})  # fmt: skip
def came(param, grad, exp_avg, row, col, row_res, col_res, *, lr=2e-4, betas=(0.9, 0.999, 0.9999),
         eps=(1e-30, 1e-16), clip_threshold=1.0):  # fmt: skip
    """Luo et al., "CAME" (ACL 2023), for matrices."""
    beta1, beta2, beta3 = betas

    def factored(rows: Any, columns: Any) -> Any:
        return (rows / rows.mean(dim=-2, keepdim=True)).rsqrt() * columns.rsqrt()

    update = grad**2 + eps[0]
    row = row.mul(beta2).add(update.mean(dim=-1, keepdim=True), alpha=1 - beta2)
    col = col.mul(beta2).add(update.mean(dim=-2, keepdim=True), alpha=1 - beta2)
    update = factored(row, col) * grad
    update = update / (update.square().mean().sqrt() / clip_threshold).clamp(min=1.0)
    exp_avg = exp_avg.mul(beta1).add(update, alpha=1 - beta1)
    res = (update - exp_avg) ** 2 + eps[1]
    row_res = row_res.mul(beta3).add(res.mean(dim=-1, keepdim=True), alpha=1 - beta3)
    col_res = col_res.mul(beta3).add(res.mean(dim=-2, keepdim=True), alpha=1 - beta3)
    return param - lr * factored(row_res, col_res) * exp_avg, exp_avg, row, col, row_res, col_res


@tilestep.rule(states={"exp_avg_sq": State(shape="scalar")})
def novograd(param, grad, exp_avg, exp_avg_sq, *, lr=1e-2, betas=(0.95, 0.98), eps=1e-8, weight_decay=1e-3, step):
    """Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (2019)."""
    beta1, beta2 = betas
    norm = grad.square().sum()
    exp_avg_sq = tilestep.where(step == 1, norm, exp_avg_sq.lerp(norm, 1 - beta2))
    scaled = grad.div(exp_avg_sq.sqrt().add_(eps)).add_(param, alpha=weight_decay)
    exp_avg = exp_avg.mul(beta1).add_(scaled)
    return param.add(exp_avg, alpha=-lr), exp_avg, exp_avg_sq


@tilestep.rule
def fromage(param, grad, *, lr=1e-2):
    """Bernstein et al., "On the Distance between two Neural Networks" (NeurIPS 2020)."""
    p_norm, d_norm = param.norm(), grad.norm()
    moves = (p_norm > 0) & (d_norm > 0)
    param = param.sub(lr * tilestep.where(moves, grad * (p_norm / d_norm), grad))
    return param / math.sqrt(1 + lr**2)


@tilestep.rule
def adamod(param, grad, exp_avg, exp_avg_sq, exp_avg_lr, *, lr=1e-3, betas=(0.9, 0.999), beta3=0.999, eps=1e-8, step):
    """Ding et al., "An Adaptive and Momental Bound Method for Stochastic Learning" (2019)."""
    beta1, beta2 = betas
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().add_(eps)
    step_size = torch.full_like(denominator, lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)).div_(denominator)
    exp_avg_lr.lerp_(step_size, 1 - beta3)
    param.add_(-torch.min(step_size, exp_avg_lr) * exp_avg)


@tilestep.rule
def adabound(
    param, grad, exp_avg, exp_avg_sq, *, lr=1e-3, betas=(0.9, 0.999), final_lr=0.1, gamma=1e-3, eps=1e-8, step
):
    """Luo et al., "Adaptive Gradient Methods with Dynamic Bound of Learning Rate" (ICLR 2019)."""
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    lower = final_lr * (1 - 1 / (gamma * step + 1))
    upper = final_lr * (1 + 1 / (gamma * step))
    rate = (step_size / exp_avg_sq.sqrt().add_(eps)).clamp_(lower, upper)
    param.sub_(rate * exp_avg)


@tilestep.rule
def lamb_scaled(param, grad, exp_avg, exp_avg_sq, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
    """You et al., "Large Batch Optimization" (ICLR 2020), version 3: the trust ratio clipped at 10."""
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad * grad, 1 - beta2)
    update = exp_avg / exp_avg_sq.sqrt().add(eps) + weight_decay * param
    weight_norm = param.norm().clamp(0, 10)
    update_norm = update.norm()
    ratio = torch.where((weight_norm == 0) | (update_norm == 0), 1.0, weight_norm / update_norm)
    param.add_(update * ratio, alpha=-lr)


@tilestep.rule(states={"norm_avg": State(shape="scalar")})
def adanorm(param, grad, exp_avg, exp_avg_sq, norm_avg, *, lr=1e-3, betas=(0.9, 0.999), r=0.95, eps=1e-8, step):
    """Dubey et al., "AdaNorm" (WACV 2023): the running norm of the gradient as one number a tensor, with `lerp_`."""
    beta1, beta2 = betas
    norm = torch.linalg.vector_norm(grad)
    norm_avg.lerp_(norm, 1 - r)
    corrected = tilestep.where(norm_avg > norm, grad * (norm_avg / (norm + eps)), grad)
    exp_avg.lerp_(corrected, 1 - beta1)
    exp_avg_sq.lerp_(grad * grad, 1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


SPELLINGS = [adabelief, yogi, diffgrad, madgrad, pnm, came, novograd, fromage, adamod, adabound, lamb_scaled, adanorm]

"""Prune one layer's weight."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.refine import conjugate_gradient
from semisparse.compress.prune.sparsegpt import inverse_factor, loss_order, prune_columns
from semisparse.compress.prune.statistics import RunningSums, Statistics
from semisparse.compress.prune.wanda import wanda
from semisparse.compress.recipe import Recipe
from semisparse.errors import InputError
from semisparse.patterns import Pattern

EXP = {"start": "dense", "cgdamp": 0.0}

@dataclass(frozen=True)
class PrunedLayer:
    weight: Tensor
    outcome: str
    error: float


def prune_layer(weight, pattern, statistics, recipe):
    weight = weight.float()
    if recipe.prune == "none":
        pattern.check(weight)
        return PrunedLayer(weight, "none", 0.0)
    if recipe.prune == "magnitude":
        pruned, outcome = magnitude(weight, pattern), "magnitude"
    elif recipe.prune == "wanda":
        pruned, outcome = wanda(weight, pattern, statistics.hessian), "wanda"
    else:
        pruned, outcome = sparsegpt(weight, pattern, statistics, recipe)
    return PrunedLayer(pruned, outcome, relative_error(pruned, weight, statistics.hessian))

def relative_error(pruned, weight, hessian):
    change = pruned - weight
    lost = (change @ hessian * change).sum().clamp_min(0)
    full = (weight @ hessian * weight).sum()
    return float((lost / full).sqrt()) if full > 0 else 0.0

def sparsegpt(weight, pattern, statistics, recipe):
    scale = statistics.hessian.diagonal().sqrt()
    dead = scale == 0
    scale = scale.masked_fill(dead, 1)
    hessian = statistics.hessian / torch.outer(scale, scale)
    hessian.diagonal()[dead] = 1
    scaled = (weight * scale).masked_fill(dead, 0)
    cross = scaled @ hessian if statistics.cross is None else (statistics.cross / scale).masked_fill(dead, 0)
    u = inverse_factor(hessian, recipe.damping)
    start = scaled
    if EXP["start"] == "target":
        start = scaled + (cross - scaled @ hessian) @ u.T @ u
    if recipe.order == "windows":
        order = loss_order(start, u, pattern)
        u = inverse_factor(hessian[order][:, order], recipe.damping)
    else:
        order = torch.arange(len(scale), device=weight.device)
    out, kept = prune_columns(start[:, order], u, pattern)
    back = order.argsort()
    out, kept = out[:, back], kept[:, back]
    if recipe.refine == "cg":
        lam = EXP["cgdamp"]
        eye = torch.eye(len(scale), device=weight.device)
        out = conjugate_gradient(out, kept, hessian + lam * eye, cross + lam * scaled)
    return out / scale, "sparsegpt"

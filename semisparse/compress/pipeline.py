"""Compress a model one decoder block at a time."""
from __future__ import annotations

import copy
import time
import torch
from torch import Tensor, nn

from semisparse.compress.blocks import *
from semisparse.compress.stages import find_stages, input_tensor, Point
from semisparse.compress.prune import prune_layer, RunningSums
from semisparse.patterns import parse_pattern

EXP = {"nonwriters": "dense", "writers": "dense"}

class Stop(Exception): pass

def _to(v, device, dtype):
    if isinstance(v, Tensor):
        return v.to(device, dtype if v.is_floating_point() else None)
    if isinstance(v, tuple | list):
        return type(v)(_to(x, device, dtype) for x in v)
    if isinstance(v, dict):
        return {k: _to(x, device, dtype) for k, x in v.items()}
    return v

def observe(block, stage, call, hidden):
    seen = {}
    want = {Point(stage.linears[0], "input"), *stage.streams.values()}
    handles = []
    for p in want:
        m = block.get_submodule(p.module)
        if p.side == "input":
            def hook(_m, args, kwargs, p=p):
                t = input_tensor(args, kwargs)
                seen[p] = t.reshape(-1, t.shape[-1])
                if p.module == stage.linears[0]: raise Stop
            handles.append(m.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            def hook(_m, args, out, p=p):
                t = first_tensor(out); seen[p] = t.reshape(-1, t.shape[-1])
            handles.append(m.register_forward_hook(hook))
    try:
        call(block, hidden)
    except Stop:
        pass
    finally:
        for h in handles: h.remove()
    return seen

@torch.no_grad()
def compress_blocks(model, batches, recipe, device="cpu"):
    device = torch.device(device)
    name, blocks = decoder_blocks(model)
    hidden, calls = record_calls(model, blocks, batches)
    dtype = torch.float32
    stream = [h.to(device, dtype) for h in hidden]
    dense_stream = list(stream)
    out = []
    for bi, block in enumerate(blocks):
        dense = copy.deepcopy(block).to(device, dtype)
        work = copy.deepcopy(dense)
        cs = [Call(_to(c.args, device, dtype), _to(c.kwargs, device, dtype), c.hidden_name) for c in calls[bi]]
        stages = find_stages(dense, list(linear_layers(block)), cs[0], stream[0])
        for st in stages:
            lin = work.get_submodule(st.linears[0])
            sums = RunningSums(weight_of(lin).shape[1], device)
            for c, h, d in zip(cs, stream, dense_stream):
                seen = observe(work, st, c, h)
                x = seen[Point(st.linears[0], "input")]
                if recipe.target == "residual" and st.every_token:
                    w = observe(dense, st, c, d)
                    if EXP["nonwriters"] == "dense" or st.streams:
                        sums.add(x, w[Point(st.linears[0], "input")], {n: w[p] - seen[p] for n, p in st.streams.items()})
                    else:
                        sums.add(x, None, {})
                else:
                    sums.add(x, None, {})
            for n in st.linears:
                t0 = time.time()
                lin = work.get_submodule(n)
                W = weight_of(lin).float()
                res = prune_layer(W, parse_pattern(recipe.pattern), sums.of_layer(n, W), recipe)
                rounded = res.weight.to(weight_of(block.get_submodule(n)).dtype)
                weight_of(lin).copy_(rounded)
                weight_of(block.get_submodule(n)).copy_(rounded)
                out.append((bi, n, res.outcome, res.error, time.time() - t0))
        stream = [c(work, h) for c, h in zip(cs, stream)]
        if recipe.target == "residual":
            dense_stream = [c(dense, h) for c, h in zip(cs, dense_stream)]
    return out

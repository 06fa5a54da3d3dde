"""Generation with packed layers on a GPU: each decoding step replays a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from semisparse.nn import join_layers
from tests.serving import Served, every_format, write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

ONE_OF_EACH = {served.format: served for served in every_format()}
NEW = 9


@pytest.mark.parametrize(("batch", "joined"), [(1, False), (5, False), (64, False), (1, True), (5, True)])
@pytest.mark.parametrize("served", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_decoding_replays_cuda_graphs(served: Served, batch: int, joined: bool, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(write(served, tmp_path / served.folder), dtype=torch.bfloat16).cuda()
    assert not joined or join_layers(model)
    ids = torch.randint(1, 250, (batch, 7), generator=torch.Generator().manual_seed(batch)).cuda()
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    options = {
        "attention_mask": mask,
        "cache_implementation": "static",
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    eager = model.generate(ids, disable_compile=True, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.generate(ids, **options)  # on a GPU, a static cache makes generate compile the decoding step
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        found = model.generate(ids, **options)
    replays = sum(event.count for event in seen.key_averages() if event.key == "cudaGraphLaunch")
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert not torch._dynamo.utils.counters["graph_break"]
    # All steps but the first token's, which is the prompt's, and two in which graphs are warmed up and recorded.
    assert replays >= NEW - 3, f"{replays} replays, {skips} skips"
    # bfloat16 rounds in other places once compiled: a few times 2^-8 of the largest logit, until tokens differ.
    for step, (one, other) in enumerate(zip(found.logits, eager.logits, strict=True)):
        assert (one - other).abs().max() <= 2**-5 * other.abs().max(), step
        if not torch.equal(found.sequences[:, : 8 + step], eager.sequences[:, : 8 + step]):
            break
    assert (found.sequences[:, 7] == eager.sequences[:, 7]).all()

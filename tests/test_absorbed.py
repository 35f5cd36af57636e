"""Exact attention straight from the cache: the baseline's numbers, its ledger, and what decides which operator runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa import dense
from latent_santa import naive as ref
from latent_santa.access import GQA_UNIT, MLA_UNIT
from latent_santa.ahead import Ahead
from latent_santa.eval.run.conditions import expand, label, slug
from latent_santa.methods import METHODS

from .cases import make_case
from .tiny_models import assert_same, cache_of, generate, padded, prompt, tiny_model


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


def in_loops(case, b, g):
    """One sequence and group over its real rows, in float64."""
    inputs = case.reference_inputs(b, g, 1)
    outputs = []
    for query in inputs["queries"]:
        weights = np.exp([ref.score(query, key, case.scale) for key in inputs["keys"]])
        outputs.append((weights @ inputs["values"] / weights.sum(), np.log(weights.sum())))
    return tuple(np.array(part) for part in zip(*outputs, strict=True))


@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_equals_its_loops_and_counts_every_row(layout):
    groups = 1 if layout == "mla" else 2
    case = make_case(layout, 3, groups, (37, 5, 22), suffix=3, hidden=((1, 0),))
    output = METHODS["absorbed_dense"].attend(case.step, latent_santa.SantaConfig(method="absorbed_dense"), None)
    for b in range(3):
        for g in range(groups):
            out, lse = in_loops(case, b, g)
            np.testing.assert_allclose(output.out[b, g].numpy(), out, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(output.lse[b, g].numpy(), lse, rtol=2e-5)
    assert output.union[:, 0].tolist() == [37, 5, 22] and output.suffix[:, 0].tolist() == [3, 2, 3]
    assert not output.routing.any()


def test_decodes_as_the_model_itself_does(model):
    ids, mask = padded([30, 40])
    wanted = generate(model, ids, 5, attention_mask=mask)
    with latent_santa.patch(model, method="absorbed_dense") as santa:
        found = generate(model, ids, 5, attention_mask=mask)
        assert_same(found, wanted)
        assert all(layer.grouped.teams is None for layer in cache_of(found).layers)
        totals, unit = santa.access.totals(), MLA_UNIT if santa.layout == "mla" else GQA_UNIT
        assert santa.access.percent == 100 and santa.full_calls == santa.sparse_calls == 5
        assert totals["routing"] == 0 and totals["denominator"] == unit.dense * totals["dense"]
        assert totals["bytes"] == totals["dense_bytes"]
        turn = torch.cat((found.sequences, prompt(20, 2, seed=8)), 1)
        mask = torch.cat((mask, torch.ones(2, 25, dtype=mask.dtype)), 1)
        again = generate(model, turn, 3, cache=cache_of(found), attention_mask=mask)
    assert_same(again, generate(model, turn, 3, attention_mask=mask))


def test_is_one_condition_of_a_run_whatever_is_swept():
    conditions = expand(
        latent_santa.SantaConfig(), ["absorbed_dense"], [8, 16], ["pooled"], ["kmeans"], [(16, 4)], [16]
    )
    assert [label(config) for config in conditions] == ["absorbed_dense"] and slug(conditions[0]) == "absorbed_dense"


# What runs on a GPU, as far as it can be seen without one


def paged_like_fa3(q, keys, values, qv=None, cache_seqlens=None, cache_leftpad=None, softmax_scale=None, **options):
    """What FlashAttention-3 documents for one query per sequence: rows from leftpad to seqlens, heads in groups."""
    assert options == {"causal": False, "return_softmax_lse": True}
    batch, _, heads, _ = q.shape
    group = heads // keys.shape[2]
    out, lse = q.new_empty(batch, 1, heads, values.shape[-1]), torch.empty(batch, heads, 1)
    for b in range(batch):
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        rows = slice(first, None if cache_seqlens is None else int(cache_seqlens[b]))
        for h in range(heads):
            s = keys[b, rows, h // group].float() @ q[b, 0, h].float()
            if qv is not None:
                s = s + values[b, rows, h // group].float() @ qv[b, 0, h].float()
            s = s * softmax_scale
            lse[b, h, 0] = s.logsumexp(0)
            out[b, 0, h] = s.softmax(0).to(q.dtype) @ values[b, rows, h // group]
    return out, lse


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize("masked", [True, False])
def test_fa3_is_given_what_it_documents(monkeypatch, layout, masked):
    monkeypatch.setattr(dense, "_fa3", lambda: paged_like_fa3)
    monkeypatch.setattr(dense, "HALF", (torch.float32,))  # so that only its arguments are looked at
    case = make_case(layout, 3, 1 if layout == "mla" else 2, (20, 5) if masked else (20, 20), suffix=3)
    step = case.step if masked else replace(case.step, visible=None)
    seen = dense._forms(step.visible, torch.float32) if masked else None
    operator = dense.FlashAttention3()
    assert operator.reason_not(step, seen) is None
    for found, wanted in zip(operator.attend(step, seen), dense.attend_all(step), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_mask_is_brought_into_the_forms_that_kernels_take():
    visible = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    seen = dense._forms(visible, torch.bfloat16)
    assert seen.start[:2].tolist() == [2, 0] and seen.stop.tolist() == [5, 6, 0] and seen.unbroken
    assert seen.bias.shape == (3, 1, 1, 6) and seen.bias.isinf()[:, 0, 0].equal(~visible)
    assert dense._forms(visible[1:2], torch.bfloat16).start is None
    holed = visible.clone()
    holed[1, 3] = False
    seen = dense._forms(holed, torch.bfloat16)
    assert not seen.unbroken


def test_each_operator_says_what_it_cannot_run(monkeypatch):
    monkeypatch.setattr(dense, "_fa3", lambda: paged_like_fa3)
    monkeypatch.setattr(dense, "dense_reason_not", lambda step: None)
    mla, gqa = (make_case(layout, 3, g, (20,), dtype=torch.float16).step for layout, g in (("mla", 1), ("gqa", 2)))
    span = dense._forms(gqa.visible, torch.bfloat16)
    holes = replace(span, unbroken=False)
    operators = {operator.name: operator for operator in dense.OPERATORS}
    able = {
        (step, seen): [name for name, operator in operators.items() if operator.reason_not(*pair) is None]
        for (step, seen), pair in {
            ("mla", "none"): (mla, None), ("mla", "span"): (mla, span), ("mla", "holes"): (mla, holes),
            ("gqa", "none"): (gqa, None), ("gqa", "span"): (gqa, span), ("gqa", "holes"): (gqa, holes),
        }.items()
    }  # fmt: skip
    ours = ["split rows", "half products", "products"]
    assert able == {
        ("mla", "none"): ["FA3", *ours], ("mla", "span"): ["FA3", *ours], ("mla", "holes"): ours,
        ("gqa", "none"): ["FA3", "FA2", *ours], ("gqa", "span"): ["FA3", "cuDNN", *ours],
        ("gqa", "holes"): ["cuDNN", *ours],
    }  # fmt: skip
    monkeypatch.setattr(dense, "_fa3", lambda: "it does not import (no such module)")
    reasons = dense.reasons_not(mla)
    assert reasons["FA3"] == "it does not import (no such module)"
    assert "a copy of the whole cache per step" in reasons["FlashMLA"] and "products" not in reasons
    single = dense.reasons_not(make_case("gqa", 3, 2, (20,)).step)
    assert {"FA3", "FA2", "cuDNN", "half products"} <= single.keys() and "split rows" not in single


def test_a_mask_is_prepared_once_per_call_and_forgotten_with_it(monkeypatch):
    made = []
    monkeypatch.setattr(dense, "_forms", lambda visible, dtype: made.append(visible) or "forms")
    step = make_case("gqa", 3, 2, (20, 7)).step

    class OnDevice(torch.Tensor):
        is_cuda = True

    shown = step.visible.as_subclass(OnDevice)
    ahead = Ahead([])
    first = replace(step, visible=shown, draw=replace(step.draw, ahead=ahead))
    for layer in range(3):
        assert dense._seen_of(replace(first, draw=replace(first.draw, layer=layer))) == "forms"
    assert len(made) == 1 and ahead in dense._seen
    del first, ahead
    assert not len(dense._seen)

"""Methods and backends as nouns: adding one is its file and a registry line; SANTA's law against its naive twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import latent_santa
from latent_santa import naive as ref
from latent_santa.access import GQA_SCAN_UNIT, MLA_SCAN_UNIT
from latent_santa.backends import BACKENDS, TorchBackend
from latent_santa.config import choices
from latent_santa.estimator import dense_attention
from latent_santa.methods import METHODS, Method
from latent_santa.methods.santa import drawn_rows
from latent_santa.noise import uniform_noise
from latent_santa.step import Output

from .cases import make_case
from .tiny_models import assert_same, generate, padded, prompt, tiny_model


@pytest.fixture(scope="module", params=["deepseek_v2-yarn", "qwen2"])
def model(request):
    return tiny_model(request.param)


class Recent(Method):
    """A toy: the last S rows, exactly, and nothing else."""

    name = "recent"
    about = "the last S rows"
    settings = ("budget", "first_token")

    def attend(self, step, config, choose):
        seen = step.visible
        if seen is None:
            seen = torch.ones(step.batch, step.rows.length, dtype=torch.bool)
        recent = seen & (seen.flip(1).cumsum(1).flip(1) <= config.budget)
        out, lse = dense_attention(step.query, step.rows, recent, step.scale)
        read = recent.sum(1)[:, None].expand(-1, step.groups)
        return Output(out, lse, torch.zeros_like(read), read, torch.zeros_like(read))


def test_a_method_is_its_class_and_a_registry_line(model, monkeypatch):
    monkeypatch.setitem(METHODS, "recent", Recent())
    assert "recent" in choices()["method"]
    ids, mask = padded([30, 40])
    wanted = generate(model, ids, 4, attention_mask=mask)
    with latent_santa.patch(model, method="recent", budget=100) as santa:
        assert_same(generate(model, ids, 4, attention_mask=mask), wanted)
        assert santa.access.percent == 100
        santa.configure(budget=10)
        santa.reset()
        generate(model, ids, 4, attention_mask=mask)
        groups = 1 if santa.layout == "mla" else 2
        assert santa.access.totals()["union"] == 4 * 2 * 2 * groups * 10
        assert "method recent, S=10" in santa.report()


def test_a_backend_is_its_class_and_a_registry_line(model, monkeypatch):
    asked, ran = [], []

    class Toy(TorchBackend):
        name = "toy"

        def reason_not(self, step, sampling):
            asked.append(sampling.k)
            return None if sampling.k < 100 else "it has few fingers"

        def sampled_attention(self, step, sampling):
            ran.append(step.draw.layer)
            return super().sampled_attention(step, sampling)

    monkeypatch.setitem(BACKENDS, "toy", Toy)
    settings = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 16, "backend": "toy"}
    with latent_santa.patch(model, **settings) as santa:
        found = generate(model, prompt(40), 5)
        assert ran == [0, 1] * 5 and asked == [4, 4]  # asked once per layer, not once per step
        santa.configure(backend="torch")
        assert_same(generate(model, prompt(40), 5), found, 0)
        santa.configure(backend="toy", budget=4000)
        with pytest.raises(
            RuntimeError, match='backend="toy" cannot run here: it has few fingers; use backend="torch"'
        ):
            generate(model, prompt(40), 5)

    class Absent(Toy):
        def unavailable(self, device):
            return f"no toy for {device}"

    monkeypatch.setitem(BACKENDS, "absent", Absent)
    with pytest.raises(RuntimeError, match="no toy for cpu"):
        latent_santa.patch(model, backend="absent")
    with pytest.raises(ValueError, match="backend='none'"):
        latent_santa.SantaConfig(backend="none")


def test_settings_are_fields():
    fields = set(latent_santa.SantaConfig().to_dict())
    for name, method in METHODS.items():
        assert set(method.settings) < fields and method.name == name and method.about


# SANTA


def uniforms_of(step, draws, shared):
    keyed = (step.draw.key, step.draw.step, step.draw.layer)
    return uniform_noise(*keyed, step.groups, step.heads, draws, shared)


@pytest.mark.parametrize("layout", ["mla", "gqa"])
@pytest.mark.parametrize("draws", ["independent", "systematic"])
@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_santa_equals_its_naive_twin(layout, draws, noise):
    case = make_case(layout, heads=3, groups=1 if layout == "mla" else 2, lengths=(21, 13), suffix=3, hidden=((1, 0),))
    config = latent_santa.SantaConfig(method="santa", budget=5, draws=draws, noise=noise)
    output = METHODS["santa"].attend(case.step, config, None)
    first = uniforms_of(case.step, 1 if draws == "systematic" else 5, noise == "shared")
    for b in range(2):
        seen = case.step.visible[b].nonzero()[:, 0]
        for g in range(case.step.groups):
            u = first[b, g].tolist()
            if draws == "systematic":
                u = [ref.systematic(u[h][0], 5) for h in range(3)]
            query, keys = (
                np.concatenate([p[b, g].double().numpy() for p in parts], -1) for parts in (case.query, case.rows.keys)
            )
            values = case.rows.values[b, g].double().numpy()
            outputs, counts = ref.santa(query, keys[seen], values[seen], u, case.scale)
            np.testing.assert_allclose(output.out[b, g].numpy(), outputs, rtol=1e-5, atol=1e-6)
            found = [int(part[b, g]) for part in (output.routing, output.union, output.suffix)]
            assert found == [counts.routing, counts.union, 0] and counts.routing == len(seen)


@pytest.mark.parametrize("draws", ["independent", "systematic"])
def test_santa_is_unbiased_with_the_variance_of_its_draws(draws):
    """Its plain average estimates the attention output itself: a row is drawn in proportion to its weight."""
    case = make_case("gqa", heads=2, lengths=(18,), suffix=2, scale=1.0)
    many, size = 20000, 4
    generator = torch.Generator().manual_seed(3)
    u = torch.rand(many, 1, 2, 1 if draws == "systematic" else size, dtype=torch.float64, generator=generator)
    if draws == "systematic":
        u = (torch.arange(size, dtype=torch.float64) + u) / size
    wide = replace(
        case.step,
        query=tuple(q.expand(many, -1, -1, -1) for q in case.query),
        rows=replace(
            case.rows,
            keys=tuple(k.expand(many, -1, -1, -1) for k in case.rows.keys),
            values=case.rows.values.expand(many, -1, -1, -1),
        ),
        draw=replace(case.draw, step=case.draw.step.expand(many)),
        visible=None,
    )
    output = drawn_rows(wide, u)
    exact, lse = dense_attention(case.query, case.rows, None, case.scale)
    assert output.lse[:1].allclose(lse)
    sample = output.out[:, 0].double()
    spread = sample.std(0)
    assert bool(((sample.mean(0) - exact[0, 0]).abs() <= 4.5 * spread / many**0.5 + 1e-6).all())
    # of S independent draws the variance is Var/S; strata lower it in all
    logits = (case.query[0] @ case.rows.keys[0].transpose(-1, -2) * case.scale)[0, 0].double().softmax(-1)
    values = case.rows.values[0, 0].double()
    variance = (logits @ values**2 - (logits @ values) ** 2) / size
    if draws == "independent":
        torch.testing.assert_close(spread**2, variance, rtol=0.06, atol=1e-4)
    else:
        assert (spread**2).sum() < 0.9 * variance.sum()


def test_a_scan_counts_a_latent_once(model):
    """Equation 14 has one unit per row, so SANTA reads 100 % in MLA; Equation 13 has half for the keys."""
    ids = prompt(40)
    with latent_santa.patch(model, method="santa", budget=4) as santa:
        found = generate(model, ids, 5)
        totals = santa.access.totals()
        assert santa.sparse_calls == 5 and santa.full_calls == 0 and totals["suffix"] == 0
        assert totals["routing"] == totals["dense"]
        per_call = totals["union"] / totals["calls"] / (1 if santa.layout == "mla" else 2)
        heads = 4 if santa.layout == "mla" else 2
        assert 1 <= per_call <= 4 * heads
        if santa.layout == "mla":
            assert santa.access.percent == 100 and totals["bytes"] == totals["dense_bytes"]
        else:
            assert santa.access.percent == pytest.approx(50 + 50 * totals["union"] / totals["dense"])
        santa.reset()
        other = generate(model, ids, 5)
        assert_same(other, found, 0)  # the same noise
        santa.configure(seed=1)
        assert not generate(model, ids, 5).scores[0].allclose(found.scores[0], atol=1e-3)
    assert (MLA_SCAN_UNIT.row, GQA_SCAN_UNIT.row) == (0, 1)


def test_many_draws_come_near_dense(model):
    ids = prompt(40)
    with latent_santa.patch(model, method="santa", budget=8, draws="systematic") as santa:
        santa.shadow = True
        errors = []
        for budget in (8, 64, 4096):
            santa.configure(budget=budget)
            santa.reset()
            generate(model, ids, 4)
            errors.append(float(santa.shadow_errors().mean()))
    assert errors[0] > 2 * errors[1] > 8 * errors[2]


# settings in dicts and files


def test_settings_to_and_from_files(tmp_path):
    config = latent_santa.SantaConfig(method="centroid", parent_size=32, budget=64, seed=2**63)
    assert latent_santa.SantaConfig.from_dict(config.to_dict()) == config
    config.save(tmp_path / "settings.json")
    assert latent_santa.SantaConfig.load(tmp_path / "settings.json") == config
    (tmp_path / "part.json").write_text('{"budget": 64}')
    assert latent_santa.SantaConfig.load(tmp_path / "part.json") == latent_santa.SantaConfig(budget=64)
    for text, message in (
        ('{"budgets": 64}', "unknown setting budgets"),
        ('{"budget": 63}', "must be divisible by P/R"),
        ("[1]", "a JSON object with settings by name is expected, not a list"),
        ("{", "settings.json"),
    ):
        (tmp_path / "settings.json").write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            latent_santa.SantaConfig.load(tmp_path / "settings.json")
        assert "settings.json" in str(error.value)
    with pytest.raises(OSError):
        latent_santa.SantaConfig.load(tmp_path / "missing.json")
    for values in (None, ["budget"], "budget"):
        with pytest.raises(ValueError, match="a dict or a JSON object .* is expected, not a"):
            latent_santa.SantaConfig.from_dict(values)
    with pytest.raises(ValueError, match="unknown setting 1"):
        latent_santa.SantaConfig.from_dict({1: 2})

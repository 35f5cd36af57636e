"""`--quant int8` puts in 8 bits what the paper did, routed experts too, or refuses; the share it states is true."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import latent_santa
from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError
from latent_santa.eval.report import paper_tables
from latent_santa.eval.run import int8, models
from latent_santa.eval.run.store import Store

from .eval_support import save_random_model
from .fake_bitsandbytes import bitsandbytes
from .tiny_models import generate, prompt, tiny_model

CPU = torch.device("cpu")
# wide enough for the experts to be most of the model, as they are in real ones
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}


@pytest.fixture(autouse=True)
def _bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package where there is one."""
    try:
        import bitsandbytes as real  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "bitsandbytes", bitsandbytes)


def saved(path: Path, name: str = "deepseek_v2-experts", **changes: Any) -> models.ModelSpec:
    tiny_model(name, **{**EXPERTS, **changes}).save_pretrained(path)
    return models.ModelSpec(str(path), quant="int8", device="cpu")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(60)).logits.float()


def test_routed_experts_are_quantised_and_the_share_counts_them(tmp_path: Path) -> None:
    spec = saved(tmp_path)
    loaded = models.load(spec, None)
    plain = models.load(models.ModelSpec(str(tmp_path), dtype="bfloat16", device="cpu"), None)
    experts = [weight.numel() for weight in plain.model.parameters() if weight.dim() == 3]
    linear = [
        module.weight.numel()
        for name, module in plain.model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("kv_b_proj", "lm_head"))
    ]
    assert len(experts) == 2 and sum(experts) > sum(linear)
    total = sum(weight.numel() for weight in plain.model.parameters())
    meant = sum(experts) + sum(linear)
    assert loaded.facts == {"parameters": total, "int8_parameters": meant, "int8_meant": meant}
    assert plain.facts == {"parameters": total, "int8_parameters": 0, "int8_meant": meant}
    kept = {
        name for name, weight in loaded.model.named_parameters() if weight.dim() == 2 and weight.dtype != torch.int8
    }
    parts = {".".join(name.split(".")[-2:]) for name in kept}
    assert parts == {"embed_tokens.weight", "lm_head.weight", "kv_b_proj.weight", "gate.weight"}


def test_experts_in_8_bits_answer_nearly_as_in_16(tmp_path: Path) -> None:
    spec = saved(tmp_path)
    wanted = logits(models.load(models.ModelSpec(str(tmp_path), dtype="bfloat16", device="cpu"), None).model)
    model = models.load(spec, None).model
    assert (logits(model) - wanted).norm() < 0.05 * wanted.norm()
    experts = next(module for module in model.modules() if isinstance(module, int8.Int8Experts))
    experts.down = experts.down[1:] + experts.down[:1]  # each expert with the output of the next one
    assert (logits(model) - wanted).norm() > 0.1 * wanted.norm()


def test_a_quantised_model_is_patched(tmp_path: Path) -> None:
    model = models.load(saved(tmp_path), None).model
    ids = prompt(80)
    wanted = generate(model, ids, 8)
    with latent_santa.patch(model, budget=1600, parents="contiguous") as santa:
        found = generate(model, ids, 8)
        assert santa.sparse_calls == 8
    assert found.sequences.tolist() == wanted.sequences.tolist()


def test_experts_left_out_show_in_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers' own int8 loading does: linear layers only."""
    monkeypatch.setattr(int8, "_experts", lambda name, module: False)
    facts = models.load(saved(tmp_path), None).facts
    assert facts["int8_parameters"] < facts["int8_meant"] / 2


def test_experts_of_another_layout_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    model = models.load(models.ModelSpec(str(tmp_path), device="cpu"), None).model
    experts, before = model.model.layers[1].mlp.experts, int8.share(model)
    experts.is_transposed = True
    with pytest.raises(EvalError, match="model.layers.1.mlp.experts .DeepseekV2Experts. keeps down_proj, gate_up_proj"):
        int8.quantise(model, CPU)
    experts.is_transposed = False
    experts.gate_up_proj_bias = nn.Parameter(torch.zeros(8, 128))
    with pytest.raises(EvalError, match="would stay in 16 bits; use --quant none"):
        int8.quantise(model, CPU)
    assert int8.share(model)["int8_parameters"] == before["int8_parameters"] == 0


def test_what_is_quantised_already_or_not_there_is_refused(tmp_path: Path) -> None:
    spec = saved(tmp_path)
    with torch.device("meta"):
        model = tiny_model("deepseek_v2-experts")
    with pytest.raises(EvalError, match="is on no device"):
        int8.quantise(model, None)
    model = models.load(spec, None).model
    with pytest.raises(EvalError, match="q_proj is a Linear8bitLt, no plain linear layer"):
        int8.quantise(model, CPU)


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3", "glm4_moe_lite"])
def test_other_families_are_quantised_whole(tmp_path: Path, name: str) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    loaded = models.load(models.ModelSpec(str(tmp_path), quant="int8", device="cpu"), None)
    assert loaded.facts["int8_parameters"] == loaded.facts["int8_meant"] > 0
    assert logits(loaded.model).isfinite().all()


def test_a_run_records_the_share_and_its_report_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_model(tmp_path / "model")
    run = ["ruler", "--model", str(model), "--tasks", "vt", "--length", "600", "--n", "1", "--methods", "dense"]
    run += ["--floor", "0", "--no-plot", "--device", "cpu", "--quant", "int8", "--out", str(tmp_path / "out")]
    assert main(run) == 0
    loaded = Store(tmp_path / "out").manifest()["loaded"]
    assert loaded["int8_parameters"] == loaded["int8_meant"] > 0
    told = f"{100 * loaded['int8_parameters'] / loaded['parameters']:.1f} % of the parameters"
    assert f"int8: {told} are in 8 bits" in capsys.readouterr().err
    weights = {
        check.what: check for check in paper_tables.checks(paper_tables.TABLES[-1], Store(tmp_path / "out").manifest())
    }
    assert weights["weights"].run == f"int8, {told}" and weights["weights"].verdict == paper_tables.HOLDS
    assert weights["SDPA's math backend"].verdict == paper_tables.MISSED
    assert main([*run, "--resume"]) == 0


def test_the_math_backend_is_a_gpus(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="--no-math-sdpa chooses between kernels of a GPU"):
        models.ModelSpec(str(saved(tmp_path).name), device="cpu", math_sdpa=False).check()

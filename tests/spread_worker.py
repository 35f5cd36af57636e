"""Two processes that hold a model together: what tests/test_tensor_parallel.py asks of each.

    python -m tests.spread_worker FOLDER

Each writes ``FOLDER/RANK.json``, what it saw in every case of :data:`CASES`: on a GPU of its own (nccl), or where
PyTorch sees none on the CPU (gloo). They are children of one process, since imports take longest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import latent_santa
from latent_santa.eval import cli

from .tiny_models import generate, padded, settings_for, tiny_model

RULER = "ruler --model builtin:tiny --tasks multivalue --prompts 1 --length 300 --budgets 16 --estimators pooled"
RULER += " --parents contiguous --floor 0 --no-plot --out"
SMALL = {"parents": "contiguous", "parent_size": 8, "representatives": 2, "budget": 8}
# two heads each of four: the second process begins in the middle of a quad of draws
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "qwen2": {},
    "8_heads": {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1},
    "1_kv_head": {"num_key_value_heads": 1},
}
KINDS = {"8_heads": "deepseek_v2", "1_kv_head": "qwen2"}
GROUPINGS = [
    {"parents": parents, "estimator": estimator}
    for parents in ("contiguous", "kmeans")
    for estimator in ("per_head", "pooled")
]
# generated rows are clustered in the step before they come to the records
CLUSTERED = {"parents": "kmeans", "parent_size": 4, "regroup_after": 8}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {"routing": "two_stage", "estimator": "per_head"}),
    ("deepseek_v2", {"routing": "two_stage", "estimator": "pooled"}),
    ("deepseek_v2", {"noise": "shared", "estimator": "pooled"}),
    ("deepseek_v2", {"regroup_after": 8, "estimator": "pooled"}),
    ("deepseek_v2", {"method": "gumbel_rows"}),
    ("deepseek_v2", {"method": "snapkv"}),
    ("deepseek_v2", {"method": "sparq"}),
    ("deepseek_v2", {"method": "h2o"}),
    ("deepseek_v2", {"method": "infllm", "parent_size": 4}),
    ("qwen2", {"method": "tova"}),
    ("qwen2", {"method": "infllm", "parent_size": 4}),
    ("qwen2", {"noise": "shared"}),
    ("qwen2", {"method": "santa"}),
    ("qwen2", {"method": "dense"}),
]
if importlib.util.find_spec("triton"):
    kernels = {"backend": "triton", "representatives": 4, "budget": 2}
    OTHERS += [("8_heads", {**kernels, "estimator": estimator}) for estimator in ("per_head", "pooled")]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model} {' '.join(map(str, settings.values()))}": (model, settings)
    for model, settings in [(m, s) for m in ("deepseek_v2", "qwen2") for s in GROUPINGS] + OTHERS
}


def whole_model(name: str) -> Any:
    return tiny_model(KINDS.get(name, name), vocab_size=98, **MODELS[name])


def seen(model: Any, settings: dict[str, Any], backend: str | None = None) -> dict[str, Any]:
    """What a generation gives: tokens, scores, and rows by layer; ``backend`` instead of the settings'."""
    if settings.get("routing") == "two_stage":
        settings = {**settings, "parents_per_head": 3}
    # Triton's interpreter takes its time, and generated rows are grouped once there are enough
    interpreted, new = "backend" in settings, 10 if "regroup_after" in settings else 2
    ids, mask = padded([32] if interpreted else [60, 41])
    settings = {**settings, "backend": backend or settings.get("backend", "auto")}
    ids, mask = ids.to(model.device), mask.to(model.device)
    with latent_santa.patch(model, settings_for(**{**SMALL, **settings})) as santa:
        santa.shadow = True
        output = generate(model, ids, 1 if interpreted else new, attention_mask=mask)
        return {
            "tokens": output.sequences.tolist(),
            "scores": torch.stack(output.scores).tolist(),
            "rows": santa.access.as_dict(),
            "sequences": santa.access.per_sequence(),
            "errors": santa.shadow_errors().tolist(),
        }


def spread_model(whole: Any, folder: Path, gathered: str = "") -> Any:
    """The model over both processes; projections named in ``gathered`` give every process all heads."""
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = None
    if gathered:
        styles = {name: "colwise_gather_output" if name in gathered else "colwise" for name in "qkv"}
        styles["o"] = "rowwise_split_input" if gathered == "qkv" else "rowwise"
        plan = {f"model.layers.*.self_attn.{name}_proj": style for name, style in styles.items()}
    model = type(whole).from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan)).eval()
    model.generation_config = whole.generation_config
    return model


def exchanges(rank: int, device: torch.device) -> list[Any]:
    """Records of other shapes in each process, and what becomes of them."""
    import torch.distributed

    from latent_santa.peers import Peers

    peers = Peers(torch.distributed.group.WORLD, rank, 2)
    record = {
        "short": torch.tensor([rank - 2], device=device).short()[0],
        "rows": torch.arange(3 + rank, device=device).view(-1, 1).expand(-1, 2)[:, 1:],
        "bound": [rank],
        "name": (rank, None),
    }
    firsts = peers.firsts(record, device)
    part = torch.full((1, 2), rank, device=device)
    flags = torch.tensor([rank == 0, False, True], device=device)
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in firsts.items()},
        peers.joined(part, 1).tolist(),
        peers.own(peers.joined(part, 1), 1).tolist(),
        peers.any(flags).tolist(),
        part.tolist(),
    ]


def main(rank: int, folder: Path) -> None:
    import torch.distributed

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    meet = {"init_method": f"file://{folder / 'meet'}", "rank": rank, "world_size": 2}
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(minutes=3), **meet)
    models = {name: spread_model(whole_model(name), folder / name) for name in MODELS}
    found: dict[str, Any] = {name: seen(models[model], settings) for name, (model, settings) in CASES.items()}
    # where processes would cluster otherwise, the first one's teams are everybody's
    found["other seeds"] = seen(models["deepseek_v2"], {**CLUSTERED, "kmeans_seed": rank})
    found["exchanges"] = exchanges(rank, device)
    gathered = spread_model(whole_model("qwen2"), folder / "qwen2", "qkv")
    found["gathered"] = seen(gathered, {"estimator": "pooled"})
    models["mixed"] = spread_model(whole_model("qwen2"), folder / "qwen2", "k")
    for name, model, options in (
        ("kv", "1_kv_head", {}),
        ("mixed", "mixed", {}),
        ("compile", "qwen2", {"compile": True}),
    ):
        try:
            latent_santa.patch(models[model], **options)
        except (NotImplementedError, RuntimeError) as error:
            found[f"{name} refused"] = str(error)
    with latent_santa.patch(models["qwen2"], **SMALL) as santa:
        generate(models["qwen2"], padded([60, 41])[0].to(device), 2)
        if rank == 0:  # asking is nobody else's business
            found["report"] = santa.report()
    found["ruler"] = cli.main([*RULER.split(), str(folder / "ruler"), "--tensor-parallel"])
    (folder / f"{rank}.json").write_text(json.dumps(found))


def two_processes(models: dict[str, Any], folder: Path, **env: str) -> list[dict[str, Any]]:
    """What each of two processes saw of the models."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    command = [sys.executable, "-m", "tests.spread_worker", str(folder)]
    # a process that asks the CUDA runtime for devices cannot fork
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | env
    here = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check(two: dict[str, Any], one: dict[str, Any]) -> None:
    """Tokens and rows are the same, scores and errors up to rounding."""
    assert two["tokens"] == one["tokens"]
    assert two["rows"] == one["rows"] and two["sequences"] == one["sequences"]
    for part in ("scores", "errors"):
        torch.testing.assert_close(torch.tensor(two[part]), torch.tensor(one[part]), rtol=1e-4, atol=1e-4)


def both(folder: Path) -> int:
    """Run both processes; 0 when both ended well. When one fails, the other would wait for it."""
    import sklearn.cluster  # noqa: F401

    from latent_santa.eval.commands import evaluate  # noqa: F401

    children = set()
    for rank in range(2):
        child = os.fork()
        if not child:
            main(rank, folder)
            os._exit(0)
        children.add(child)
    failed = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not failed:
            failed = 1
            for other in children:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(both(Path(sys.argv[1])))

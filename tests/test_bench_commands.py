"""What the bench commands refuse, before anything is loaded or timed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError

pytest.importorskip("triton", reason="triton is not installed: bench operator cannot run")

from latent_santa.eval.bench import facts
from latent_santa.eval.bench.workload import FORMAT, Size, load, save, synthetic


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code: object = main(["bench", *words])
    except SystemExit as stop:  # what the parser itself refuses
        code = stop.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--rounds 0", "--rounds must be at least 1, got 0"),
        ("--observations 0", "--observations must be at least 1, got 0"),
        ("--warmup -1", "--warmup must be at least 0, got -1"),
        ("--evict -1", "--evict must be at least 0, got -1"),
        ("--layout gqa --head-dim 0", "--head-dim 0: the kernels take 1 to 512 dimensions"),
        (
            "--layout gqa --head-dim 20 --routing-dtype int4",
            "20 key dimensions do not divide into an even",
        ),
        ("--pooled-budgets 0", "argument --pooled-budgets: '0': give values separated by commas, such as 128,256"),
        ("--context 32K", "argument --context: '32K': give values separated by commas, such as 128,256"),
        ("--workload x.pt --goals", "without --workload"),
        ("--workload x.pt", "no workload file x.pt"),
    ],
)
def test_operator_refuses(capsys: pytest.CaptureFixture[str], options: str, said: str) -> None:
    assert said in refused(capsys, "operator", *options.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_operator_without_a_gpu_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "operator")
    assert "there is no CUDA device" in said and "bench decode --device cpu" in said


@pytest.mark.parametrize("content", [b"", b"no workload", None])
def test_a_file_that_holds_no_workload_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.pt"
    if content is None:
        torch.save({"format": FORMAT, "keys": ()}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(EvalError, match=rf"x.pt is no workload of format {FORMAT} \(\w+\): write it again with"):
        load(path, "cpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--budget 3", "S must be divisible by P/R"),
        ("--prompt-file {dir}/none", "none: No such file or directory"),
        ("--prompt-file {dir}", "Is a directory"),
        ("--prompt-file {dir}/bytes", "bytes is not UTF-8 text"),
        ("--out {dir}", "is a directory: give a file to write"),
        ("--out {dir}/bytes/x.pt", "bytes: cannot be written to"),
        ("--layer -1", "--layer must be at least 0, got -1"),
        ("--layer 6", "--layer 6: the model has layers 0 to 5"),
        ("--length 10000000", "--length 10000000 and --steps 2: 10,000,002 positions are more than the 8,704 that"),
        ("--length 100000", "100,002 positions are more than the 8,704 that builtin:tiny was made for; ask for less"),
        ("--steps 100000", "--length 2048 and --steps 100000: 102,048 positions are more than the 8,704"),
        ("--out ''", "argument --out: it is empty"),
    ],
)
def test_capture_refuses_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    from latent_santa.eval.run import models

    monkeypatch.setattr(models, "load", None)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert said in refused(capsys, "capture", *shlex.split(options.format(dir=tmp_path)))


def test_capture_takes_the_middle_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.pt"
    assert main(["bench", "capture", "--length", "300", "--budget", "32", "--out", str(path)]) == 0
    assert "builtin:tiny layer 3, 301 rows" in capsys.readouterr().out
    assert load(path, "cpu").source == "builtin:tiny layer 3"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--device bogus", "--device bogus: supported are auto and cpu"),
        ("--device mps", "PyTorch sees no such device here"),
        ("--out {dir}/file", "file: cannot be written to"),
        (
            "--device cpu --shape small --settings per_head+triton",
            "--settings with +triton, --dtype bfloat16: rows are bfloat16, and Triton's interpreter gets bfloat16",
        ),
        ("--context 32768 --steps 200000", "--context 32768 and --steps 200000: 232,779 positions are more than the"),
        ("--device cpu --context 100,200000", "--context 200000 and --steps 16: 200,027 positions are more than the"),
        (
            "--device cpu --shape small --batch 1000000",
            "--batch 1000000 and --context 32768: weights and cached rows take",
        ),
        ("--device cpu --shape small --layers 1000000 --context 256", "weights and cached rows take"),
        ("--steps 3", "--steps must be at least 4, got 3"),
        ("--settings sparse", "--settings: 'sparse' is no setting: give one of transformers, dense, absorbed_dense"),
        ("--settings transformers+compile", "'transformers+compile' is no setting"),
        ("--settings dense+kmeans", "'dense+kmeans' is no setting"),
        ("--settings pooled+int4+int4", "'pooled+int4+int4' is no setting"),
        ("--settings pooled,pooled", "--settings: one is given twice"),
        ("--device cpu --budget 3", "S must be divisible by P/R"),
        ("--resume", "--resume continues the run in --out: give --out DIR"),
        ("--table {dir}", "decode.json holds no run of bench decode (FileNotFoundError)"),
    ],
)
def test_decode_refuses_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    from latent_santa.eval.bench import shapes
    from latent_santa.kernels.support import interpreting

    if "triton" in options and not interpreting():
        pytest.skip("needs Triton's interpreter")
    original = shapes.random_model

    def sized(config: Any, dtype: torch.dtype, device: str) -> Any:
        assert device == "meta", "weights were made before the refusal"
        return original(config, dtype, device)

    monkeypatch.setattr(shapes, "random_model", sized)
    (tmp_path / "file").touch()
    assert said in refused(capsys, "decode", *options.format(dir=tmp_path).split())


def test_the_memory_of_weights_and_cache_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V2-Lite has 15.7 billion weights; a row of its cache has 576 numbers in each of 27 layers."""
    from latent_santa.eval.run import sizes

    cache = 8 * (32768 + 27) * 576 * 27 * 2
    for free in (31.4e9 + cache - 2e8, 1e9):
        monkeypatch.setattr(sizes, "free_bytes", lambda device, free=free: int(free))
        said = refused(capsys, "decode", "--device", "cpu", "--batch", "8", "--context", "32768")
        assert f"and cpu has {free / 2**30:,.1f} GiB free; ask for less" in said
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 1_000_000)
    assert "--length 2048 and --steps 2: a cache of 2,050 rows takes" in refused(capsys, "capture", "--device", "cpu")


def test_the_memory_of_synthetic_rows_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from latent_santa.eval.commands.bench_operator import _check_memory
    from latent_santa.eval.run import sizes

    monkeypatch.setattr(sizes, "free_bytes", lambda device: 1 << 30)
    small, large = Size("mla", 16, 1, 32768, 1), Size("gqa", 28, 4, 131072, 8)
    assert large.bytes() == 131072 * 8 * 4 * 2 * 128 * 2
    _check_memory([small, None], 256, "cuda")
    with pytest.raises(EvalError, match="--context 131072 and --batch 8, twice, and --evict 256 take 4.2 GiB and cuda"):
        _check_memory([small, large], 256, "cuda")
    with pytest.raises(EvalError, match="^--evict 2000 take 2.0 GiB and cuda has 1.0 GiB free"):
        _check_memory([None], 2000, "cuda")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said() -> None:
    workload = synthetic(Size("gqa", 2, 1, 32, 1, 16), device="cpu")
    with pytest.raises(EvalError, match="--out /dev/full: cannot be written .*give another --out"):
        save(workload, Path("/dev/full"))


def test_half_a_file_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("file write failed")

    workload = synthetic(Size("gqa", 2, 1, 32, 1, 16), device="cpu")
    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(EvalError, match="x.pt: cannot be written .file write failed"):
        save(workload, tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["", "decode", "operator", "capture"])
def test_help_imports_no_torch(kind: str) -> None:
    code = (
        "import sys; from latent_santa.eval.cli import main\n"
        "try: main(['bench', *sys.argv[1:], '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(sys.modules.keys() & {'torch', 'transformers', 'numpy', 'triton'}), file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code, *kind.split()], capture_output=True, text=True, timeout=60)
    assert shown.stderr.strip() == "[]" and f"usage: latent-santa bench {kind}".strip() in shown.stdout


@pytest.mark.parametrize("out", [["--out", "/some/where"], ["--out=/some/where"], []])
def test_a_recorded_command_leaves_out_where_its_files_lie(out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["latent-santa", "bench", "decode", *out, "--batch", "8"])
    assert facts.facts("cpu")["command"] == "latent-santa bench decode --batch 8"

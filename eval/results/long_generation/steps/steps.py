"""The time of every token of a generation, with and without regrouping, for DeepSeek-V2-Lite's shape (random weights).

python steps.py OUT.json, with latent_santa installed, on one GPU. BATCHES, CONTEXT, STEPS and LAYERS change the sizes.
"""

import json
import os
import statistics
import sys

import torch

import latent_santa
from latent_santa.config import SantaConfig
from latent_santa.eval.bench.decode import Clock
from latent_santa.eval.bench.facts import facts
from latent_santa.eval.bench.filled import collect, filled_by_drawing
from latent_santa.eval.bench.shapes import random_model, shape_config

SHAPE = "deepseek-v2-lite"
UNTIMED = 5  # tokens: the prompt's, and those of a capture


def generated(model, ids, steps, cache):
    """Milliseconds between tokens."""
    clock = Clock()
    torch.manual_seed(3)
    vocabulary = model.config.vocab_size
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    ends = {"eos_token_id": vocabulary, "pad_token_id": 0}  # looked for, and never found
    mask = torch.ones_like(ids)
    model.generate(
        ids, attention_mask=mask, max_new_tokens=steps, streamer=clock, past_key_values=cache, **sampling, **ends
    )
    times = clock.times[UNTIMED:]
    return [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)]


def main(out):
    context, steps = int(os.environ.get("CONTEXT", 32768)), int(os.environ.get("STEPS", 300))
    layers = os.environ.get("LAYERS")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = shape_config(SHAPE, int(layers) if layers else None, dtype)
    model = random_model(config, dtype, device)
    santa = latent_santa.patch(model, graphs="on" if device == "cuda" else "off")
    found = facts(device, weights="random", shape=SHAPE, layers=config.num_hidden_layers, context=context)
    results = []
    for batch in map(int, os.environ.get("BATCHES", "1,8").split(",")):
        filled = filled_by_drawing(model, batch, context, steps + 64)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(config.vocab_size, (batch, context + 1), generator=generator).to(device)
        for parents in ("contiguous", "kmeans"):
            for after in ("auto", 0):
                collect(torch.device(device))
                santa.configure(SantaConfig(parents=parents, budget=128, regroup_after=after))
                cache = filled.for_patched()
                for run in range(2):  # the first compiles and captures
                    filled.rewind(cache, santa)
                    times = generated(model, ids, steps if run or after == "auto" else 24, cache)
                    ordered = sorted(times)
                    median, slowest = statistics.median(times), ordered[-1]
                    numbers = {"median": median, "p99": ordered[int(0.99 * len(times))], "max": slowest}
                    named = {
                        "parents": parents,
                        "regroup_after": after,
                        "run": run,
                        "batch": batch,
                        "steps": len(times),
                    }
                    results.append({**named, **numbers, "slowest": ordered[-40:]})
                    told = ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())
                    print(f"{named}: {told}, slowest / median {slowest / median:.2f}", flush=True)
                    with open(out, "w") as file:
                        json.dump({"facts": found, "results": results}, file, indent=1)
        del filled, cache


if __name__ == "__main__":
    main(sys.argv[1])

"""Freezing a run: settings and prompts are fixed before anything is generated, and a resumed run must match them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from latent_santa.config import SantaConfig
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.conditions import from_manifest, label, old_santa, swept
from latent_santa.eval.run.environment import environment
from latent_santa.eval.run.render import Renderer
from latent_santa.eval.run.store import Prompt, Store, differences
from latent_santa.eval.sources import Request, load_samples

# what a setting was in runs that were started before there was an option for it
BEFORE_OPTIONS = {
    "batch_size": 1,
    "routing_dtype": "model",
    "regroup_after": 0,
    "draws": "independent",
    "template_options": "{}",
    "math_sdpa": True,
    "tensor_parallel": 1,
}


def make_prompts(
    request: Request, renderer: Renderer, tiny: bool, limit: int | None, advance: Callable[[str], None]
) -> tuple[list[Prompt], dict[str, Any], list[str]]:
    """Samples of the request, rendered and checked against the context limit; with their origin and warnings."""
    loaded = load_samples(request, renderer, tiny, advance)
    prompts = [renderer.prompt(sample, limit) for sample in loaded.samples]
    origin = loaded.origin | {"most_tokens": max(prompt.n_tokens for prompt in prompts)}
    return prompts, origin, [*loaded.warnings, *renderer.warnings()]


def new_run(
    store: Store,
    settings: dict[str, Any],
    conditions: tuple[SantaConfig, ...],
    prompts: list[Prompt],
    origin: dict[str, Any],
    warnings: list[str],
) -> None:
    """Write prompts and manifest of a run that begins."""
    store.freeze(
        {
            "settings": settings,
            "conditions": [swept(condition) for condition in conditions],
            "origin": origin,
            "warnings": warnings,
            "environment": environment(),
            "prompt_ids": [prompt.sample.id for prompt in prompts],
        },
        prompts,
    )


def check_resume(store: Store, settings: dict[str, Any], conditions: tuple[SantaConfig, ...]) -> list[str]:
    """Compare a stored run with what is asked for now; returns notes on a changed environment.

    Settings must be equal. Conditions may be added, which changes nothing measured so far, but not left out.
    Raises EvalError naming everything that changed.
    """
    manifest = store.manifest()
    changed = differences(BEFORE_OPTIONS | manifest["settings"], settings)
    wanted = [swept(condition) for condition in conditions]
    for condition in from_manifest(manifest, store.manifest_path):
        if swept(condition) not in wanted:
            changed.append(f"{label(condition)}: part of the run then, not asked for now")
        if condition.method == "santa" and old_santa(manifest):
            changed.append(f"{label(condition)}: rows without replacement then, with replacement now")
    if changed:
        listed = "".join(f"\n  {line}" for line in changed)
        raise EvalError(
            f"{store.directory} cannot be resumed, its settings are not the same:{listed}\n"
            "Use the settings that it was started with, or another --out."
        )
    then, now = manifest["environment"], environment()
    return [f"since the run was started, {line}" for line in differences(then, now)]


def extend(store: Store, conditions: tuple[SantaConfig, ...]) -> None:
    """Add new conditions to a resumed run's manifest."""
    manifest = store.manifest()
    wanted = [swept(condition) for condition in conditions]
    if manifest["conditions"] != wanted:
        store.write_manifest(manifest | {"conditions": wanted})

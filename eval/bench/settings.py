"""The settings that ``bench decode`` compares, each in one word: ``pooled+two_stage+compile``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# what decodes; None is the model without a patch
BASES: dict[str, dict[str, Any] | None] = {
    "transformers": None,
    "dense": {"method": "dense"},
    "absorbed_dense": {"method": "absorbed_dense"},
    "per_head": {"estimator": "per_head"},
    "pooled": {"estimator": "pooled"},
}
# what may be added to sampling
SAMPLED: dict[str, dict[str, Any]] = {
    "two_stage": {"routing": "two_stage"},
    "kmeans": {"parents": "kmeans"},
    "shared": {"noise": "shared"},
    "int8": {"routing_dtype": "int8"},
    "int4": {"routing_dtype": "int4"},
    "torch": {"backend": "torch"},
    "triton": {"backend": "triton"},
}
# what may be added to anything that is patched
PATCHED = ("compile", "eager")


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        name: the word, as it was asked for.
        overrides: fields of :class:`latent_santa.SantaConfig`, or None for the model without a patch.
        compile: ``patch(compile=True)``.
        eager: ``patch(graphs="off")``.
    """

    name: str
    overrides: dict[str, Any] | None
    compile: bool = False
    eager: bool = False

    @property
    def patched(self) -> bool:
        return self.overrides is not None


def setting(word: str, shared: dict[str, Any], file: dict[str, Any] | None = None) -> Setting:
    """A setting from its word.

    Args:
        shared: fields of all sampled settings, such as the budget.
        file: all fields of the setting ``config``, where there is one.

    Raises:
        ValueError: the word is none; the message says what there is.
    """
    bases = BASES if file is None else {**BASES, "config": file}
    base, *additions = word.split("+")
    sampled = base in ("per_head", "pooled")
    known = {*(SAMPLED if sampled else ()), *(PATCHED if base != "transformers" else ())}
    if base not in bases or len(set(additions)) < len(additions) or not known.issuperset(additions):
        more, any_patch = (", ".join("+" + name for name in names) for names in (SAMPLED, PATCHED))
        raise ValueError(
            f"{word!r} is no setting: give one of {', '.join(bases)}; per_head and pooled take {more}, and all but "
            f"transformers {any_patch}"
        )
    overrides = bases[base]
    if overrides is not None:
        overrides = {**overrides, **(shared if sampled else {})}
        for name in additions:
            overrides |= SAMPLED.get(name, {})
    return Setting(word, overrides, "compile" in additions, "eager" in additions)

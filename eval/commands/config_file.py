"""Settings from files that `SantaConfig.save` wrote: --config instead of a command's options, --also beside them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from latent_santa.eval.errors import EvalError

if TYPE_CHECKING:
    from latent_santa.config import SantaConfig

SEVERAL: set[Any] = set()  # types of options that take several values; `options.values` adds to it
PLURALS = {
    "method": "methods",
    "budget": "budgets",
    "estimator": "estimators",
    "routing_dtype": "routing_dtypes",
    "backend": "backends",
}


def read(text: str) -> SantaConfig:
    """The settings of a file, as argparse's type for an option."""
    from latent_santa.config import SantaConfig

    try:
        return SantaConfig.load(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def single(word: str, base: SantaConfig, shared: Iterable[str]) -> SantaConfig:
    """The settings of one word of --also, a preset or a file, with what all settings of a run share.

    base    settings that hold what is shared
    shared  names of fields that are equal in all settings of a run, and an option each

    Raises:
        EvalError: there are no such settings, or they differ from the base in something that is shared.
    """
    from latent_santa.config import PRESETS, SantaConfig
    from latent_santa.eval.run.conditions import swept_by

    try:
        given = SantaConfig.preset(word) if word in PRESETS else read(word)
    except argparse.ArgumentTypeError as error:
        raise EvalError(f"--also {error}; presets are {', '.join(PRESETS)}") from error
    if given.first_token != base.first_token:
        raise EvalError(f"--also {word} has first_token={given.first_token!r}; here it is {base.first_token!r} always")
    default, other = SantaConfig(), []
    for name in shared:
        if getattr(given, name) not in (getattr(default, name), getattr(base, name)):
            other.append(f"--{name.replace('_', '-')} {getattr(given, name)}")
    if other:
        raise EvalError(
            f"--also {word}: it needs {' '.join(other)}, which all settings of a run share: say so for the whole run"
        )
    return base.for_method(given.method, **{name: getattr(given, name) for name in swept_by(given.method)})


class FromConfig(argparse.Action):
    """Gives every option of the method its value from a SantaConfig file; options after --config change it again.

    A setting that the command has no option for is refused, unless it is the default or the method does not use it.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        option: str | None = None,
    ) -> None:
        from latent_santa.config import SantaConfig

        config: SantaConfig = value
        setattr(namespace, self.dest, config)
        used, default = config.used(), SantaConfig()
        options = {action.dest: action for action in parser._actions}
        for field, setting in config.to_dict().items():
            if config.routing == "one_stage" and field in ("parents_per_head", "parent_summary"):
                continue  # they are of two stages
            option_of = options.get(PLURALS.get(field, field)) or options.get(field)
            if field == "method" and option_of is not None:
                namespace.methods = ["dense", *([setting] if setting != "dense" else [])]
            elif option_of is not None:
                setattr(namespace, option_of.dest, [setting] if option_of.type in SEVERAL else setting)
            elif field in used and setting != getattr(default, field):
                self._refuse(f"the file has {field}={setting!r}, and {parser.prog} has no option for it")
        if "representatives" not in used and hasattr(namespace, "methods"):
            for field in ("estimator", "noise"):
                if field in used and getattr(config, field) != getattr(default, field):
                    self._refuse(
                        f"the file has {field}={getattr(config, field)!r}, and {parser.prog} runs {config.method} with "
                        f"{getattr(default, field)!r} only"
                    )
        if "parent_size" in used and "representatives" not in used and hasattr(namespace, "centroid_sizes"):
            namespace.centroid_sizes = [config.parent_size]

    def _refuse(self, reason: str) -> None:
        raise argparse.ArgumentError(self, reason)


def add_config_option(group: Any) -> None:
    """Add --config to a parser or a group of its options. Call it last: it sees the options that are there."""
    group.add_argument(
        "--config",
        action=FromConfig,
        type=read,
        metavar="FILE",
        help="settings that SantaConfig.save wrote, instead of the options of the method; options after it change it",
    )

"""The --config option: settings from a file that `SantaConfig.save` wrote, in place of a command's options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latent_santa.config import SantaConfig

# Where a command takes several values of a field, and the name of its option. Others have the field's own name.
LISTS = {
    "method": "methods",
    "budget": "budgets",
    "parents": "parents",
    "estimator": "estimators",
    "routing": "routing",
    "parents_per_head": "parents_per_head",
    "parent_summary": "parent_summary",
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


class FromConfig(argparse.Action):
    """Gives every option of the method its value from a SantaConfig file; options behind --config change it again.

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
        for field, setting in config.to_dict().items():
            place = LISTS.get(field)
            if field == "method" and hasattr(namespace, "methods"):
                namespace.methods = ["dense", *([setting] if setting != "dense" else [])]
            elif place is not None and hasattr(namespace, place):
                setattr(namespace, place, [setting])
            elif hasattr(namespace, field):
                setattr(namespace, field, setting)
            elif field in used and setting != getattr(default, field):
                raise argparse.ArgumentError(
                    self, f"the file has {field}={setting!r}, and {parser.prog} has no option for it"
                )
        if config.method == "centroid" and hasattr(namespace, "centroid_sizes"):
            namespace.centroid_sizes = [config.parent_size]


def add_config_option(group: Any) -> None:
    """Add --config to a parser or a group of its options. Call it last: it sees the options that are there."""
    group.add_argument(
        "--config",
        action=FromConfig,
        type=read,
        metavar="FILE",
        help="settings that SantaConfig.save wrote, in place of the options of the method; options behind it change it",
    )

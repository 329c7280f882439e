"""Options that all services have."""

from collections.abc import Callable

import click

from services.common.logs import FORMATS, LEVELS

anonymous_option = click.option(
    "--anonymous",
    is_flag=True,
    help="Answer other machines without asking for a token; listening beyond loopback needs this or --tokens.",
)


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the log."""
    level = click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
    form = click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True)
    return form(level(command))

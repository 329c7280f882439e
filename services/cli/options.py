"""Options shared by all services."""

from collections.abc import Callable

import click

from services.common.logs import FORMATS, LEVELS

anonymous_option = click.option(
    "--anonymous",
    is_flag=True,
    help="Let everyone who reaches this machine ask without a token; without it that is refused beyond loopback.",
)


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the logging options."""
    level = click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
    form = click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True)
    return form(level(command))

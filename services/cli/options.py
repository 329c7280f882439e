"""Options that all services have."""

from collections.abc import Callable

import click

from services.common.logs import FORMATS, LEVELS


def access_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say who may ask, and under which names."""
    anonymous = click.option(
        "--anonymous",
        is_flag=True,
        help="Let everyone who reaches this machine ask without a token; without it that is refused beyond loopback.",
    )
    hosts = click.option(
        "--allow-host",
        "allow_hosts",
        multiple=True,
        metavar="NAME",
        help="A name by which HTTP requests may call this machine, beside localhost and addresses: that of a proxy or "
        "a container. Others are refused, so that no web page can read it through a name of its own; with --tokens, "
        "beyond loopback, all are taken unless one is given.",
    )
    return anonymous(hosts(command))


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the log."""
    level = click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
    form = click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True)
    return form(level(command))

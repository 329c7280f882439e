"""Options shared by all services."""

from collections.abc import Callable

import click

from services.common.logs import FORMATS, LEVELS


def access_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for access: tokens, anonymous clients and host names."""
    anonymous = click.option(
        "--anonymous",
        is_flag=True,
        help="Answer other machines without asking for a token; listening beyond loopback needs this or --tokens.",
    )
    hosts = click.option(
        "--allow-host",
        "allow_hosts",
        multiple=True,
        metavar="NAME",
        help="Name of this machine in HTTP requests, besides localhost and addresses: that of a proxy or a container. "
        "May be repeated. Other names are refused, so that no web page can read the service through its own name; "
        "beyond loopback with --tokens, all names are accepted unless one is given.",
    )
    return anonymous(hosts(command))


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the logging options."""
    level = click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
    form = click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True)
    return form(level(command))

"""`shardgrad bench`, which has moved to `benchmarks/` of the source tree."""

from __future__ import annotations

import click


@click.command(
    hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Say where benchmarks are now."""
    click.echo(
        "shardgrad bench has moved: in a checkout of the repository, type python -m benchmarks.",
        err=True,
    )
    ctx.exit(2)

"""``tfdist serve``: a trained model behind HTTP, as TensorFlow Serving speaks it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click

from tfdist.cli import completion, serve_to, voice
from tfdist.cli.option_table import options_of
from tfdist.errors import OptionError
from tfdist.launch.jobs import Where
from tfdist.serving import served
from tfdist.serving.scaling import Scaling
from tfdist.serving.serving import Serving, carry_out
from tfdist.strategies import parse_options

_EPILOG = """\b
Examples:
  tfdist serve runs/digits
  tfdist serve runs/digits --replicas 2 --max-batch 64 --batch-wait-ms 5
  tfdist serve runs/digits --min-replicas 0 --max-replicas 4
  tfdist serve runs/digits --watch
  tfdist serve runs/digits --host 0.0.0.0 --token-file token.txt
  tfdist serve runs/large --strategy pipeline -o stages=2
  tfdist serve model.keras --model model.py:model_fn --trained-on data/digits
  tfdist serve runs/digits --to ray digits-on-ray --min-replicas 0 --max-replicas 8
  tfdist serve runs/digits --to tf-serving serving/digits
  tfdist serve runs/digits --to sagemaker digits-on-aws
\b
  curl -d '{"instances": [[0.1, 0.2]]}' http://127.0.0.1:8501/v1/models/digits:predict
  curl -F file=@photo.jpg http://127.0.0.1:8501/v1/models/photos:predict
"""
# Of the rule of replicas, as Ray Serve's, but for its 2 requests: a forward pass here takes many
# together.
_DEFAULTS = (8.0, 5.0, 60.0)


@click.command("serve", epilog=_EPILOG)
@click.argument("source", metavar="RUN|MODEL", type=click.Path(path_type=Path))
@click.option(
    "--model",
    metavar="FILE.py:NAME",
    help="A function that returns the model.  [default: that of config.json beside the weights]",
)
@click.option(
    "--trained-on",
    metavar="DIR",
    shell_complete=completion.data,
    help="The shards that the model was trained on: requests are read as they are.  [default: "
    "those that config.json beside the weights names]",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Serve each new version of the best model of RUN, or of MODEL, in the place of the one "
    "before it: no request is lost.",
)
@click.option("--name", help="Of the model, in addresses.  [default: that of RUN or MODEL]")
@click.option(
    "--to",
    type=(click.Choice(serve_to.TARGETS), click.Path(path_type=Path)),
    metavar="|".join(serve_to.TARGETS) + " DIR",
    help="Write into DIR what another server takes, and serve nothing here: an application of Ray "
    "Serve, the next version for TensorFlow Serving, or a model.tar.gz.",
)
@click.option("--host", default="127.0.0.1", help="Where it listens.")
@click.option("--port", default=8501, type=click.IntRange(0, 65535), help="0 is any that is free.")
@options_of(
    Where,
    *("strategy", "options"),
    strategy={
        "default": "single",
        "help": "What divides the model among the devices of each replica: pipeline or mesh.",
    },
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    metavar="N",
    help="Processes that have the model, a fixed number.  [default: 1]",
)
@click.option(
    "--min-replicas",
    type=click.IntRange(0),
    metavar="N",
    help="Their number follows the load: fewest of them. With 0 the first request waits for one.",
)
@click.option("--max-replicas", type=click.IntRange(1), metavar="N", help="Most of them.")
@click.option(
    "--target-requests",
    type=click.FloatRange(0.01, 1e6),
    help="Requests at a time that each of them is to have.  [default: 8]",
)
@click.option(
    "--up-delay-s",
    type=click.FloatRange(0, 1e6),
    help="How long more must be wanted before there are more.  [default: 5]",
)
@click.option(
    "--down-delay-s",
    type=click.FloatRange(0, 1e6),
    help="How long fewer must be wanted before there are fewer.  [default: 60]",
)
@click.option(
    "--max-batch",
    default=32,
    type=click.IntRange(1),
    help="Most requests that are answered together.",
)
@click.option(
    "--batch-wait-ms",
    default=2.0,
    type=click.FloatRange(0, 1000),
    help="How long the first of them waits for others.",
)
@click.option(
    "--check",
    default=16,
    type=click.IntRange(0),
    metavar="K",
    help="Records of the validation split that must be answered as by tfdist predict, before "
    "anybody else is.",
)
@click.option(
    "--timeout-s", default=30.0, type=click.FloatRange(1), help="Until a request is given up."
)
@click.option(
    "--start-timeout-s",
    default=120.0,
    type=click.FloatRange(1),
    help="Until the replicas must be ready.",
)
@click.option("--max-body-mb", default=32, type=click.IntRange(1, 1024), help="Largest request.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="A file with the token that clients must show: Authorization: Bearer TOKEN.",
)
def command(
    source: Path,
    model: str | None,
    trained_on: str | None,
    watch: bool,
    name: str | None,
    to: tuple[str, Path] | None,
    batch_wait_ms: float,
    max_body_mb: int,
    strategy: str,
    option: tuple[str, ...],
    **given: Any,
) -> None:
    """Answers requests with the best model of a run, or with a saved one, until Ctrl-C or SIGTERM.

    A photo or a row of a table is sent as it is: it is read as those of the training were.
    Before the server listens, it must answer records of the validation split as tfdist predict.
    """
    if to is not None:
        serve_to.check_options(to[0])
    found = served.find(source, model=model, trained_on=trained_on, name=name)
    numbers = {name: given.pop(name) for name in inspect.signature(scaling_asked).parameters}
    how = Serving(
        strategy=strategy,
        options=parse_options(strategy, option),
        scaling=scaling_asked(**numbers),
        batch_wait_s=batch_wait_ms / 1000,
        body_bytes=max_body_mb << 20,
        watch=source if watch else None,
        **given,
    )
    if to is not None:
        serve_to.write(*to, found, how)
        return

    def take(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "listening":
            host = f"[{event['host']}]" if ":" in event["host"] else event["host"]
            address = f"http://{host}:{event['port']}"
            voice.tell("listening", address=address, compared=event["compared"])
            if event["compared"]:
                click.echo(f"{event['compared']} records are answered as by tfdist predict")
            click.echo(f"listening  {address}/v1/models/{found.name}:predict")

    carry_out(found, how, take, click.echo)


def scaling_asked(
    *,
    replicas: int | None,
    min_replicas: int | None,
    max_replicas: int | None,
    target_requests: float | None,
    up_delay_s: float | None,
    down_delay_s: float | None,
) -> Scaling:
    """Returns what the options of ``tfdist serve`` ask for: one replica, where they name no number.

    Raises:
        OptionError: a fixed number and bounds, what counts within bounds without them, or bounds
            that no number is within.
    """
    is_scaled = (min_replicas, max_replicas) != (None, None)
    if is_scaled and replicas is not None:
        raise OptionError(
            "--replicas, a fixed number, must go without --min-replicas and --max-replicas",
            received="both",
            mend="Leave one of them out",
        )
    given = (target_requests, up_delay_s, down_delay_s)
    if not is_scaled and given != (None, None, None):
        raise OptionError(
            "--target-requests, --up-delay-s and --down-delay-s must go with --min-replicas or "
            "--max-replicas",
            received="neither",
            mend="Give --max-replicas N as well",
        )
    target, up_s, down_s = (
        default if one is None else one for one, default in zip(given, _DEFAULTS, strict=True)
    )
    least = most = replicas or 1
    if is_scaled:
        least = 1 if min_replicas is None else min_replicas
        most = max(1, least) if max_replicas is None else max_replicas
    if least > most:
        raise OptionError(
            "--min-replicas must be at most --max-replicas",
            received=f"{least} and {most}",
            mend=f"Give --max-replicas {least} or more",
        )
    return Scaling(least, most, target, up_s, down_s, is_scaled)

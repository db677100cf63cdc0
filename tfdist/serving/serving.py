"""``tfdist serve`` as a whole: the gate's half here, then the server in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.compat import follow_program
from tfdist.errors import OptionError, RankFailedError, TfdistError, extra_module
from tfdist.launch.jobs import Where
from tfdist.records.buckets.cache import scratch_folder
from tfdist.runs import ranks
from tfdist.runs.predicting import padding_of
from tfdist.serving import gate, watched
from tfdist.serving.scaling import Scaling
from tfdist.serving.served import Served
from tfdist.strategies import spec_of
from tfdist.training.engine import model_path

_PROGRAM = "tfdist.serving.program"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a model is served.

    Attributes:
        host, port: the address; port 0 is any that is free.
        strategy, options: what divides the model among the devices of each process; "single": none.
        scaling: how many processes have the model.
        max_batch: most requests in a forward pass.
        batch_wait_s: how long the first one of a batch waits for others.
        check: records of the validation split that the gate compares; 0: none.
        timeout_s: until a request is given up.
        start_timeout_s: until the replicas must be ready.
        body_bytes: of a request, at most.
        watch: a run folder or a file whose later versions are served, too; None: none are.
        token_file: whose first line clients must show; None: whoever asks is answered.
    """

    host: str
    port: int
    strategy: str
    options: dict[str, Any]
    scaling: Scaling
    max_batch: int
    batch_wait_s: float
    check: int
    timeout_s: float
    start_timeout_s: float
    body_bytes: int
    watch: Path | None
    token_file: Path | None


def carry_out(
    served: Served,
    how: Serving,
    on_event: Callable[[int, dict[str, Any]], None],
    tell: Callable[[str], None],
) -> None:
    """Serves until a signal.

    Args:
        on_event: see ``ranks.run``; "listening" has host, port and the number of compared records.
        tell: is told in one line why nothing was compared, and how records are padded.

    Raises:
        TfdistError: a mistake of the user's, or a server that answers otherwise than predict.
        RankFailedError: the server failed.
    """
    extra_module("litserve", "litserve", "a server", "serve")
    check_divides(how.strategy, how.options)
    if how.token_file is not None:
        read_token(how.token_file)
    follow_program(os.environ, model_path.parts(served.model)[0], served.weights)
    if padding_of(served.file) is not None:
        tell(
            "records are padded to one length, as by `tfdist predict` of a training without "
            "--pad-to: a model without masks may answer otherwise than where it was trained"
        )
    with scratch_folder() as folder:
        # So that replicas which start later have the model that went through the gate.
        first = replace(served, weights=watched.place_of(folder, 1, served.file))
        mark = watched.copy(served.file, first.weights)
        is_compared = gate.prepare(first, how.check, folder, tell)
        if is_compared:
            _expect(first, folder)
        config = {
            **vars(how),
            "scaling": vars(how.scaling),
            # Beside those of this program's own process, which has no model.
            "divided": {"strategy": how.strategy, "options": how.options},
            "served": first.to_json(),
            "watch": how.watch and os.path.abspath(how.watch),
            "mark": mark,
            "token_file": how.token_file and os.path.abspath(how.token_file),
            "gate": str(folder) if is_compared else None,
        }
        where = Where(strategy="single", options={}, stall_timeout_s=None)
        ranks.run(_PROGRAM, config, where, on_event)


def _expect(served: Served, folder: Path) -> None:
    """As ``gate.expect``; its errors are of the file that the user knows."""
    try:
        gate.expect(served, folder, served.weights.parent / watched.EXPECTED)
    except RankFailedError:
        raise
    except TfdistError as error:
        raise TfdistError(served.told(error)) from error


def check_divides(strategy: str, options: dict[str, Any]) -> None:
    """Raises OptionError: a replica, which is one process, has no use for a strategy."""
    if strategy == "single":
        return
    spec = None if strategy == "auto" else spec_of(strategy, options)
    if spec is None or not spec.divides_model or spec.launchers:
        raise OptionError(
            "--strategy must be single, or one that divides a model in one process",
            received=f"'{strategy}'" + (" with replicas" if "replicas" in options else ""),
            mend="Choose pipeline or mesh; several processes are --replicas N",
        )


def read_token(path: Path) -> str:
    """Returns the token that clients must show. Raises OptionError: the file holds none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        token, error_text = "", f": {error}"
    else:
        error_text = ", which has none"
    if not token or not token.isascii() or not token.isprintable() or "\n" in token:
        raise OptionError(
            "--token-file must hold a token, one line of ASCII",
            received=f"{path}{error_text}",
            mend="Write one: `openssl rand -hex 32 > FILE`",
        )
    return token

"""`tunerd tune`: from an ONNX file to a verified, tuned artifact."""

from __future__ import annotations

import json as json_module
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tunerd.cli.consoles import steps_shown
from tunerd.cli.options import AsJson, Debug
from tunerd.errors import ExitCode
from tunerd.settings import TuneSettings

if TYPE_CHECKING:
    from rich.console import Console

    from tunerd.api import Run, SizedRun
    from tunerd.studies.profile.auto import Choice
    from tunerd.vocabulary.verdict import Verdict


def tune(
    settings: TuneSettings,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Tune MODEL for a share of a device; leave a verified artifact and a report.

    Exit codes: 0 faster, 1 no gain, 2 cannot tell; 10 and more: no artifact, or not all that comes
    after it. The same command in the same folder goes on where it stopped.
    """
    from tunerd.cluster.job import require_kept

    settings = _here(settings)
    require_kept(settings.out)
    is_auto = settings.share_from == "auto"
    if dry_run:
        _print_plan(settings, json)
        return 0
    from tunerd import api
    from tunerd.telemetry.progress import open_progress

    if settings.sizes:
        return _tune_sizes(settings, json)
    choice = None
    if is_auto:
        settings, choice = _choose_share(settings, quiet=json)
    if settings.precision_from == "auto":
        with steps_shown(quiet=json) as show:
            settings = api.choose_precision(settings, show)
    with open_progress(quiet=json) as progress:
        run = api.carry_out(settings, progress)
    code = _exit_code(run.verdict)
    if choice is not None:
        with steps_shown(quiet=json) as show:
            run = api.review_share(run, settings, choice, show)
    if json:
        _print_json(run, code)
    else:
        _print(run, settings)
    return int(code)


def _tune_sizes(settings: TuneSettings, as_json: bool) -> int:
    from tunerd import api
    from tunerd.telemetry.progress import open_progress

    with open_progress(quiet=as_json) as progress:
        run = api.carry_out_sizes(settings, progress)
    code = _exit_code(run.verdict)
    results = api.results_of(run)
    if as_json:
        from tunerd.report.sizes_page import sizes_json

        document = sizes_json(results, run.sizes, run.padded_dims) | {
            "artifact": str(run.artifact.path),
            "report": str(run.report_path),
            "exit_code": int(code),
        }
        print(json_module.dumps(document, ensure_ascii=False))
        return int(code)
    from rich.console import Console

    from tunerd.report.sizes_page import next_try_of, sizes_result

    console = Console()
    console.print(sizes_result(results, run.padded_dims))
    _print_places(console, run)
    _print_next(console, next_try_of(results))
    return int(code)


def _print_places(console: Console, run: Run | SizedRun) -> None:
    console.print(f"artifact  {run.artifact.path}", highlight=False, soft_wrap=True)
    console.print(f"report    {run.report_path}", highlight=False, soft_wrap=True)


def _print_next(console: Console, hint: str) -> None:
    if hint:
        console.print(f"next      {hint}", highlight=False, soft_wrap=True)


def _choose_share(settings: TuneSettings, *, quiet: bool) -> tuple[TuneSettings, Choice]:
    """Return the settings with a share, and say on stderr which it is."""
    from tunerd import api
    from tunerd.report.choice_text import choice_sentence

    with steps_shown(quiet=quiet) as show:
        resolved, choice = api.choose_share(settings, show)
    if not quiet:
        print(choice_sentence(choice), file=sys.stderr, flush=True)
    return resolved, choice


def _exit_code(verdict: Verdict) -> ExitCode:
    from tunerd.vocabulary.verdict import Verdict

    codes = {Verdict.FASTER: ExitCode.BETTER, Verdict.CANNOT_TELL: ExitCode.CANNOT_TELL}
    return codes.get(verdict, ExitCode.NO_GAIN)


def _print_json(run: Run, code: ExitCode) -> None:
    from tunerd.report.choice_text import share_json
    from tunerd.report.run_result import run_json

    share = run.share
    document = run_json(run.view, run.outcome) | {
        "share": None
        if share is None
        else share_json(share.aftermath) | {"report": str(share.report)},
        "report": str(run.report_path),
        "exit_code": int(code),
    }
    print(json_module.dumps(document, ensure_ascii=False))


def _print(run: Run, settings: TuneSettings) -> None:
    from rich.console import Console

    from tunerd.report.choice_text import share_sentences
    from tunerd.report.precision_text import precision_sentences
    from tunerd.report.run_result import next_try, run_result

    console = Console()
    console.print(run_result(run.view, run.outcome, fidelity=bool(settings.fidelity)))
    for sentence in share_sentences(run.share.aftermath) if run.share else ():
        console.print(sentence, highlight=False)
    _print_places(console, run)
    for sentence in precision_sentences(run.view.settings):
        console.print(f"precision {sentence}", highlight=False, soft_wrap=True)
    _print_next(console, next_try(run.outcome, settings.precision))


def _print_plan(settings: TuneSettings, as_json: bool) -> None:
    from tunerd import api
    from tunerd.telemetry.progress import open_progress

    each = [settings]
    if settings.sizes:
        from tunerd.studies.sizes import runs_of

        each = [run.settings for run in runs_of(settings)]
    with open_progress(quiet=as_json) as progress:
        plans = [api.plan_of(one, progress.warn).details for one in each]
    if as_json:
        print(json_module.dumps({"sizes": plans} if settings.sizes else plans[0]))
        return
    from rich.console import Console

    from tunerd.report.table import plan_table

    for plan in plans:
        Console().print(plan_table(plan))


def _here(settings: TuneSettings) -> TuneSettings:
    """Return settings with the cluster of this process and the store's password.

    Runs this program again to hide a password in its command line.
    """
    from tunerd.cli.options import hidden_password
    from tunerd.cluster.job import cluster_address

    found: dict[str, object] = {"address": cluster_address(settings.address)}
    if settings.store is not None and (password := hidden_password()) is not None:
        found["store_password"] = password
    return settings.model_copy(update=found)

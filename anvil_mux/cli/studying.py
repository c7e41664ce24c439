"""The commands that run traffic in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anvil_mux.config.values import Profile
    from anvil_mux.lab import contest, study
from anvil_mux import state
from anvil_mux.cli.arguments import (
    add_clients,
    add_json,
    argument,
    clients,
    configuration,
    read_counts,
    read_positive,
    reader,
)
from anvil_mux.cli.output import FAILED, complain, opened, print_json, print_table, progress, say

BROKEN_SHOWN = 5
TTFT_AXIS = "mean time to the first byte (s, simulated)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = partial(argument, command)
    add(
        "files COMPOSE",
        "compose files whose settings and backends to use; by default every model has GPU 0 to itself",
        nargs="*",
    )
    add(
        "--model [A=]B",
        "the compose file's name for model A of the traffic; without A=, for every model",
        action="append",
        default=[],
    )
    add(
        "--routing",
        "simulate routing instead: the prompts of each --trace, on replicas of one model",
        action="store_true",
    )
    add(
        "--profile NAME[,NAME]",
        "generated traffic for models a and b: single, balanced, bursty, dominant, interleave, mixed, "
        "two-clients, clients, or all (the default without --trace and --log)",
        type=reader("lab.study:choose_profiles"),
        default=(),
    )
    add_clients(command)
    add(
        "--trace FILE",
        "a workload file, or the name of a bundled one; may be repeated. With --routing: "
        "claude_code_le64k, claude_code_le131k, mooncake_conversation_600s, or a file",
        action="append",
        default=[],
    )
    add("--log EVENTS", "replay the clients of an event log (`serve --event-log`)")
    add(
        "--policy NAME[,NAME]",
        "the policies to compare (default: all that need no settings). "
        "With --routing: routing policies, as listed by `config --routing`",
    )
    add(
        "--eviction NAME[,NAME]",
        "also compare these evictions (cost, lru, demand_lru, or all); they differ only where several "
        "models fit on a GPU",
        type=reader("lab.study:choose_evictions"),
        default=(),
    )
    add(
        "--batching KEY=VALUE[,..]",
        "what every engine does at once: at_once=N answers (default: what its command says, or is usual "
        "for it, or 256), each longer by slower_each=PART for each other one (default 0.055); "
        "slower_each=0,at_once=inf makes all as fast as one alone",
        type=reader("lab.engines:read_batching"),
        default={},
    )
    add(
        "--known-costs",
        "policies know from the beginning what loads and evictions take, as in a program that has run "
        "for long; by default they only know the loads of models that are loaded in the beginning",
        action="store_true",
    )
    add(
        "--seeds N",
        "repeat with the random seeds 0 to N-1 (default 1) and show the means",
        type=read_positive,
        default=1,
    )
    add("--check", "check whether the log of --log breaks an invariant", action="store_true")
    add(
        "--plot FILE",
        "plot the resident models, queues and waits; with --routing the means of each policy "
        "(needs matplotlib)",
    )
    add("--replicas N", "with --routing: the number of replicas (default 8)", type=read_positive)
    add(
        "--sessions N[,N]",
        "with --routing: use N sessions of a trace, chosen anew for each seed (default: all)",
        type=read_counts,
    )
    add(
        "--engine KEY=VALUE[,..]",
        "with --routing: a property of the simulated engine, such as kv_tokens=100000 (docs/measuring.md)",
        type=reader("lab.engines:read_engine"),
    )
    add(
        "--known",
        "with --routing: let the router know true token counts and cache sizes, and stream every answer",
        action="store_true",
    )
    add(
        "--engine-profile FILE",
        "simulate engines that slow down with the requests that they answer at once as a profile from "
        "`anvil-mux profile` says; with --routing, that are as fast as it says",
        type=reader("cli.studying:read_profile"),
    )
    add(
        "--slo KEY=SECONDS[,..]",
        "with --routing: report what share of requests meets these objectives; with a profile, by "
        "default ttft=6,tpot=0.05",
        type=reader("lab.contest:read_objectives"),
    )
    add("--csv FILE", "with --routing: write every run to a CSV file")
    add_json(command)
    command.epilog = (
        "Times are in seconds. MAKESPAN is the time from the first arrival to the last answer, SWAPPING that "
        "of all evictions and loads together. WAIT, RMS, P50, P95 and LONGEST are waits: WAIT is their mean, "
        "RMS the root of the mean of their squares, in which long waits weigh more. BUSY is the share of the "
        "makespan in which requests were served; LEAST/MOST compares the answers of the client that got the "
        "fewest with those of the one that got the most. A wait ends when the engine gets the request, "
        "though it may wait on there. Exit code 1: an invariant is broken. With "
        "--routing, times are in ms: to the first byte (TTFT), to the last (E2E), between tokens (TPOT). HIT "
        "is the share of the input that was cached, BALANCE the requests of the busiest replica divided by "
        "those of the least busy one. SLO-TTFT, SLO-TPOT and SLO are the shares of requests that met one "
        "objective, or both; REFUSED requests met none, and have no latency."
    )


def read_profile(file: str) -> Profile:
    """The profile in a file; ValueError names it."""
    from anvil_mux.config.values import read_profile

    try:
        return read_profile(state.read_text(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file} {error}") from None


def run(given: argparse.Namespace) -> int:
    from anvil_mux.lab import engines, plot, recording, report, study
    from anvil_mux.lab.workload import ModelNames

    if given.routing:
        return _simulate_routing(given)
    policies = _policies(given, study.choose_policies)
    _refuse_what_makes_no_sense(given)
    if given.plot:
        plot.check_file(given.plot)
    config = configuration(given.files) if given.files else None
    called = ModelNames.parse(given.model)
    batching = engines.USUAL_BATCHING
    if given.engine_profile:
        batching = batching._replace(slower_each=engines.fitted(given.engine_profile).slower_each)
    batching = batching._replace(**given.batching)
    names = given.profile or (() if given.trace or given.log else study.choose_profiles("all"))
    cases = [*study.profiles(names, given.seeds, config, called, clients(given))]
    cases += [study.trace(name, config, called) for name in given.trace]
    runs = []
    if given.log:
        log = recording.read(given.log, config, say, called)
        runs.append(log.run(checked=given.check))
        if given.policy or not given.check:
            cases.append(log.case(batching))
    _say_what_is_asked(cases, given.files)
    cases = [replace(case, batching=batching, known_costs=given.known_costs) for case in cases]
    if given.eviction:
        cases = [each for case in cases for each in study.under_evictions(case, given.eviction)]
    total = len(cases) * len(policies)
    tell = progress()
    for run in study.study(cases, policies, keep_logs=bool(given.plot)):
        runs.append(run)
        tell(f"{len(runs)} of {total} runs")
    if given.plot:
        drawn = [(run.title, run.log, run.config, run.begins) for run in runs if run.seed == 0]
        plot.draw(drawn, given.plot)
    if given.json:
        print_json([run.row() for run in runs])
    else:
        print_table(report.STUDY_HEAD, report.study_table(runs))
    return _blame(runs)


def _say_what_is_asked(cases: Iterable[study.Case], files: Sequence[str]) -> None:
    """Say which models of compose files traffic asks for, and what is not of the files."""
    loads = {case.workload.name: case.workload.load_seconds for case in cases} if files else {}
    for name, load_seconds in loads.items():
        models, of = ", ".join(load_seconds), ", ".join(files)
        say(f"{name} asks for {models}, with the GPUs and settings of {of}; how long loads take is its own")


def _refuse_what_makes_no_sense(given: argparse.Namespace) -> None:
    if given.check and not given.log:
        given.refuse("--check is for what --log names; simulations are always checked")
    if given.model and not given.files:
        given.refuse("--model is for a compose file: it names its models")
    for name in ("replicas", "sessions", "engine", "known", "slo", "csv"):
        if getattr(given, name):
            given.refuse(f"--{name.replace('_', '-')} is for --routing")


def _policies(given: argparse.Namespace, choose: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    try:
        return choose(given.policy or "all")
    except ValueError as error:
        given.refuse(f"argument --policy: {error}")
        raise  # not reached: refuse ends the program


def _simulate_routing(given: argparse.Namespace) -> int:
    from anvil_mux.config.values import DEFAULT_ROUTING
    from anvil_mux.lab import contest, plot, report

    if given.profile or given.log or given.check or given.eviction or not given.trace:
        given.refuse("--routing replays prompts: it takes --trace, and no --profile, --log or --eviction")
    if given.model:
        given.refuse("--routing has one model, so it takes no --model")
    if given.batching or given.known_costs:
        given.refuse("--batching and --known-costs are not for --routing: --engine says how fast engines are")
    own = configuration(given.files).routing_policies if given.files else {}
    policies = _policies(given, lambda names: contest.choose_policies(names, own))
    kept = given.slo
    if given.engine_profile or any(contest.predicts(policy, own) for policy in policies):
        kept = kept or contest.Objectives()
    drawn = list(_scenarios(given))
    with ExitStack() as outputs:
        # Whether they can be written is known before the long work begins.
        file = outputs.enter_context(opened(given.csv)) if given.csv else None
        figure = outputs.enter_context(plot.picture(given.plot)) if given.plot else None
        tell, total = progress(), len(drawn) * len(policies)
        results = []
        for field in drawn:
            for policy in policies:
                results.append(contest.run(field, policy, own, kept))
                tell(f"{len(results)} of {total} runs")
        if file:
            report.write_routing_csv(results, file)
        if figure:
            plot.draw_dots(report.routing_panels(results), DEFAULT_ROUTING, TTFT_AXIS, figure)
    if given.json:
        print_json([result.row() for result in results])
    else:
        head = (*report.ROUTING_HEAD, *(report.KEPT_HEAD if kept else ()))
        print_table(head, report.routing_table(results))
    return 0


def _scenarios(given: argparse.Namespace) -> Iterator[contest.Scenario]:
    from anvil_mux.lab import contest, engines

    engine, profile = given.engine or engines.SimulatedEngine(), given.engine_profile
    if profile:
        engine = engines.fitted(profile, engine)
    replicas, sessions = given.replicas or 8, given.sessions or ()
    seeds, known = range(given.seeds), given.known
    return contest.draw(given.trace, sessions, seeds, replicas, engine, profile=profile, known=known)


def _blame(runs: Iterable[study.StudyRun]) -> int:
    """Print the broken invariants, if there are any; the exit code."""
    code = 0
    for run in runs:
        for line in (run.wrong or ())[:BROKEN_SHOWN]:
            code = complain(f"{run.title}: broken invariant: {line}", FAILED)
    return code

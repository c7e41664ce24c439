"""Workloads under policies: what is run, what is told of it, and that broken logs are noticed."""

from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import ConfigError
from anvil_mux.lab import engines, report, study
from anvil_mux.lab.engines import AssumedBatching, Engines
from anvil_mux.lab.figures import figures
from anvil_mux.lab.recording import LOGGED, Recording, read
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.study import StudyRun
from anvil_mux.lab.workload import (
    PROFILES,
    BadWorkload,
    ClientGroups,
    ModelNames,
    two_clients,
)
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.policies import POLICIES, Eager, Stay
from anvil_mux.telemetry import eventlog


@dataclass(frozen=True)
class Reluctant:
    """Stay for a time that has no default."""

    seconds: float

    def decide(self, seen):
        return Stay(seen.now + self.seconds)


RELUCTANT = f"{__name__}:Reluctant"


UNLIMITED = AssumedBatching(0.0, inf)
"""Engines whose answers all take as long as alone: what comes out can be computed by hand."""


def figures_of(profile, policy):
    [case] = study.profiles([profile], 1)
    return study.run(replace(case, batching=UNLIMITED), policy).figures


# What eager and debounce do with the profiles; any other number means that a profile or a policy has changed.


@pytest.mark.parametrize(
    ("profile", "policy", "swaps", "mean_wait", "makespan"),
    [
        ("single", "eager", 0, 0.0, 0.5),
        ("balanced", "eager", 39, 7.55, 257.0),
        ("bursty", "eager", 3, 5.25, 23.0),
        ("dominant", "eager", 2, 10.179, 13.65),
        ("interleave", "eager", 2, 11.033, 13.5),
        ("balanced", "debounce", 20, 3.5, 151.0),
        ("bursty", "debounce", 3, 6.0, 26.0),
        ("dominant", "debounce", 1, 2.225, 12.95),
        ("interleave", "debounce", 1, 5.0, 10.5),
    ],
)
def test_a_profile_has_known_figures(profile, policy, swaps, mean_wait, makespan):
    told = figures_of(profile, policy)
    assert told.swaps == swaps
    assert told.wait_mean_seconds == pytest.approx(mean_wait, abs=0.001)
    assert told.makespan_seconds == pytest.approx(makespan)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_profile_breaks_an_invariant_or_loses_a_request(policy):
    for case in study.profiles(PROFILES, 2):
        told = study.run(case, policy)
        assert told.wrong == []
        assert told.figures.failed == 0
        ended = sum(event.kind in ("released", "severed") for event in told.log)
        assert told.figures.requests == ended, told.title


REPLY = 2.0**-10
"""What a client that does not think takes to ask again, where moments may not coincide."""


@pytest.mark.parametrize(
    ("service", "pause", "loads", "stop"),
    [
        (0.5, 0.0, (3.0, 9.0), 0.0),  # the profile
        (2.0**-10, 0.0, (1.0, 1.0), 0.125),
        (2.0**-10, REPLY, (1.0, 1.0), 0.125),
        (2.0**-5, REPLY, (3.0, 9.0), 0.5),
        (0.5, 0.125, (3.0, 9.0), 0.0),
    ],
)
def test_of_two_clients_that_never_pause_adaptive_starves_none(service, pause, loads, stop):
    made = replace(two_clients(), load_seconds=dict(zip("ab", loads, strict=True)), stop_seconds=stop)

    def follow(request, now):
        return [request._replace(at=now + pause)] if now < (100.0 if service > 0.1 else 30.0) else []

    asked = tuple(request._replace(seconds=service) for request in made.requests)
    case = study.Case(replace(made, requests=asked, follow=lambda: follow), made.config())
    runs = {policy: study.run(case, policy) for policy in ("eager", "adaptive")}
    log = runs["adaptive"].log
    answers = [[event.at for event in log if event.kind == "released" and event.model == m] for m in "ab"]
    assert min(map(len, answers)) * 3 >= max(map(len, answers))
    assert runs["adaptive"].figures.swaps <= runs["eager"].figures.swaps
    waits = [event.seconds for event in log if event.kind == "leased" and event.seconds]
    assert fmean(waits) <= 5 * (fmean(loads) + stop)  # a turn is half as long again as the swaps around it
    assert runs["adaptive"].wrong == []


def test_of_three_clients_that_never_pause_none_waits_for_max_wait():
    loads = {"a": 3.0, "b": 9.0, "c": 6.0}
    three = tuple(Arrival(0.0, model, 0.5) for model in loads)
    made = replace(two_clients(), load_seconds=loads, requests=three)
    told = study.run(study.Case(made, made.config()), "adaptive")
    assert told.figures.wait_max_seconds < 60.0


def test_without_other_traffic_no_policy_swaps():
    assert {policy: figures_of("single", policy).swaps for policy in POLICIES} == dict.fromkeys(POLICIES, 0)


# What engines do at once


def test_an_engine_answers_slower_if_many_ask_at_once():
    [case] = study.profiles(["single"], 1)
    slower = AssumedBatching().slower_each
    assert 0.01 < slower < 0.1
    assert study.run(case, "eager").figures.makespan_seconds == pytest.approx(0.5 * (1 + 39 * slower))
    few = replace(case, batching=AssumedBatching(0.0, 8))
    assert study.run(few, "eager").figures.makespan_seconds == 0.5 * 40 / 8


def test_an_engine_does_at_once_what_its_kind_does_or_what_is_assumed():
    backends = (Backend("v", "v"), Backend("l", "l", engine="llamacpp"))
    batching = AssumedBatching(0.25).of_backends(Config(backends))
    assert batching == {"v": (0.25, 256), "l": (0.25, 4)}
    assert AssumedBatching(0.0, 2).of_backends(Config(backends)) == {"v": (0.0, 2), "l": (0.0, 2)}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("slower_each=0.1", {"slower_each": 0.1}),
        ("at_once=4,slower_each=0", {"at_once": 4.0, "slower_each": 0.0}),
        ("at_once=inf", {"at_once": inf}),
    ],
)
def test_what_is_assumed_can_be_said_in_part(text, read):
    assert engines.read_batching(text) == read


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("slots=4", "unknown part 'slots'; known: slower_each, at_once"),
        ("at_once", "at_once must be a number, not ''"),
        ("at_once=0", "at_once must be at least 1, not 0"),
        ("slower_each=nan", "slower_each must be at least 0, not nan"),
    ],
)
def test_what_cannot_be_assumed_is_told(text, problem):
    with pytest.raises(ValueError, match=problem):
        engines.read_batching(text)


# What policies know


SEEN = []


@dataclass(frozen=True)
class Watching:
    """Eager, that notes what it is told of costs."""

    def decide(self, seen):
        for queue in seen.queues:
            [resident] = seen.residents
            SEEN.append((queue.model, queue.load_seconds, queue.learned, resident.reload_seconds))
        return Eager().decide(seen)


@pytest.mark.parametrize(
    ("known_costs", "first", "second"),
    [
        (False, ("b", 3.0, False, 3.0), ("a", 3.0, False, 9.0)),  # b is believed to load like a, until it did
        (True, ("b", 9.0, True, 3.0), ("a", 3.0, True, 9.0)),
    ],
)
def test_policies_learn_what_swaps_cost_unless_they_know_it(known_costs, first, second):
    SEEN.clear()
    [case] = study.profiles(["balanced"], 1)
    told = study.run(replace(case, known_costs=known_costs), f"{__name__}:Watching")
    assert [SEEN[0], SEEN[1]] == [first, second]
    assert told.known_costs == known_costs
    assert ("known_costs" in told.row(), "known costs" in told.way) == (known_costs, known_costs)


# What is run


def test_all_profiles_are_eight_and_only_what_is_drawn_has_seeds():
    assert study.choose_profiles("all") == (
        "single", "balanced", "bursty", "dominant", "interleave", "mixed", "two-clients", "clients",
    )  # fmt: skip
    cases = [(case.workload.name, case.seed) for case in study.profiles(["single", "mixed"], 3)]
    assert cases == [("single", 0), ("mixed", 0), ("mixed", 1), ("mixed", 2)]


def test_names_come_in_the_order_given_and_once():
    assert study.choose_profiles("mixed,single,mixed") == ("mixed", "single")
    assert study.choose_policies("debounce,eager,debounce") == ("debounce", "eager")


@pytest.mark.parametrize("names", ["", "single,", "singl", "single,all"])
def test_an_unknown_profile_is_told_with_the_known_ones(names):
    with pytest.raises(ValueError, match=r"known: single, balanced, .*, mixed, two-clients, clients, all"):
        study.choose_profiles(names)


def test_all_policies_are_those_that_need_no_settings(monkeypatch):
    assert study.choose_policies("all") == tuple(POLICIES)
    monkeypatch.setitem(POLICIES, "reluctant", Reluctant)
    assert "reluctant" not in study.choose_policies("all")
    assert study.choose_policies("reluctant") == ("reluctant",)
    with pytest.raises(ValueError, match="unknown policy 'lazy'; known: eager"):
        study.choose_policies("eager,lazy")


def test_settings_of_the_configuration_are_for_its_own_policy_only():
    backends = (Backend("a", "a", ("0",)), Backend("b", "b", ("0",)))
    config = Config(backends, policy="debounce", policy_settings={"quiet": 3.0}, max_wait=50.0)
    [case] = study.profiles(["bursty"], 1, config)
    case = replace(case, batching=UNLIMITED)
    patient, eager = study.run(case, "debounce"), study.run(case, "eager")
    assert patient.config.policy_settings == {"quiet": 3.0}
    assert patient.figures.makespan_seconds == 23.0 + 3 * 3.0
    assert (eager.config.policy, eager.config.policy_settings, eager.config.max_wait) == ("eager", {}, 50.0)
    assert eager.figures.makespan_seconds == 23.0


def test_a_policy_without_the_settings_that_it_needs_is_told():
    [case] = study.profiles(["single"], 1)
    with pytest.raises(ConfigError, match=r"policy .*Reluctant: .*'seconds'; a compose file can give it"):
        study.run(case, RELUCTANT)
    given = replace(case.config, policy=RELUCTANT, policy_settings={"seconds": 1.0})
    assert study.run(replace(case, config=given), RELUCTANT).figures.requests == 40


BOTH_ON_ONE_GPU = Config(
    (Backend("one", "small", ("3",), aliases=("s",)), Backend("two", "large", ("3",))), drain_timeout=0.25
)


def test_a_profile_meets_the_backends_of_the_configuration():
    called = ModelNames({"a": "s", "b": "large"})
    [case] = study.profiles(["dominant"], 1, BOTH_ON_ONE_GPU, called)
    assert case.config is BOTH_ON_ONE_GPU
    told = study.run(case, "eager")
    assert {event.model for event in told.log if event.kind == "ready"} == {"small", "large"}
    assert told.figures.severed == 4 + 10  # before b comes, and before a comes back
    with pytest.raises(
        BadWorkload, match=r"dominant asks for b; .* small, large only: .*--model b=NAME which to take"
    ):
        [*study.profiles(["dominant"], 1, BOTH_ON_ONE_GPU, ModelNames({"a": "s"}))]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_names_of_models_do_not_change_what_a_profile_does(profile):
    own = PROFILES[profile]()
    crossed = ModelNames({"a": "b", "b": "a"})
    [case] = study.profiles([profile], 1, own.config(), crossed)
    [same] = study.profiles([profile], 1)
    there, here = study.run(case, "eager"), study.run(same, "eager")
    assert there.figures == here.figures
    assert [crossed.name(e.model) for e in there.log] == [e.model for e in here.log]


def test_a_model_that_stands_for_several_loads_as_long_as_the_slowest():
    made = PROFILES["interleave"]().renamed(ModelNames(every="small"))
    assert (made.load_seconds, made.resident) == ({"small": 9.0}, ("small",))


def test_requests_that_found_a_full_line_are_not_forgotten():
    [case] = study.profiles(["interleave"], 1)
    told = study.run(replace(case, config=replace(case.config, max_queue=10)), "eager")
    assert told.figures.requests == 60
    assert told.figures.failed == 60 - 1 - 10


TRACE = '{"workload": "t", "models": {"a": {"load_seconds": 3}, "c": {"load_seconds": 4}}}\n' + (
    '{"at": 0, "model": "a", "seconds": 1}\n'
)


def test_a_trace_meets_the_backends_of_the_configuration(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(TRACE)
    assert [backend.name for backend in study.trace(str(file)).config.backends] == ["a", "c"]
    config = Config((Backend("one", "a", ("0",)), Backend("two", "c", ("1",))))
    case = study.trace(str(file), config)
    assert case.config is config
    told = study.run(case, "eager")
    assert [(e.at, e.backend) for e in told.log if e.kind == "ready"] == [(3.0, "one")]
    with pytest.raises(BadWorkload, match="asks for a, c; the backends serve b, d only"):
        study.trace(str(file), Config((Backend("b", "b"), Backend("d", "d"))))


# What is told


def one(policy, seed, waits, *, wrong=(), profile="mixed"):
    log = [Event(float(n), "leased", "a", "a", n, 0, wait) for n, wait in enumerate(waits, 1)]
    return StudyRun(profile, policy, seed, Config(()), log, figures(log), wrong)


def test_a_row_has_every_figure_by_its_name():
    row = one("eager", 3, [1.0, 2.0], wrong=["something"]).row()
    assert {key: row[key] for key in ("profile", "policy", "seed", "requests", "violations")} == {
        "profile": "mixed",
        "policy": "eager",
        "seed": 3,
        "requests": 2,
        "violations": 1,
    }
    assert {
        *("swaps", "makespan_seconds", "swap_seconds", "busy_fraction", "failed", "severed"),
        *("wait_mean_seconds", "wait_p50_seconds", "wait_p95_seconds", "wait_max_seconds"),
    } <= row.keys()


def test_the_table_has_the_means_over_the_seeds_and_the_longest_wait_of_all():
    runs = [one("eager", 0, [1.0, 1.0]), one("debounce", 0, [4.0]), one("eager", 1, [3.0, 9.0], wrong=["x"])]
    first, second = (dict(zip(report.STUDY_HEAD, row, strict=True)) for row in report.study_table(runs))
    assert (first["PROFILE"], first["POLICY"], first["RUNS"], first["REQUESTS"]) == (
        "mixed",
        "eager",
        "2",
        "2",
    )
    assert (first["WAIT"], first["P50"], first["LONGEST"]) == ("3.50", "2.00", "9.00")
    assert first["VIOLATIONS"] == "1"
    assert (second["POLICY"], second["RUNS"], second["WAIT"]) == ("debounce", "1", "4.00")


def test_it_is_told_how_much_the_client_gets_who_gets_the_least():
    [run] = study.study(
        study.profiles(["clients"], 1, clients=ClientGroups((2, 1), seconds=60.0)), ["eager"], keep_logs=True
    )
    answers = Counter({"a": 0, "b": 0})
    for event in run.log:
        answers[event.model] += event.kind == "released"
    assert run.row()["fairness"] == run.fairness
    assert run.fairness == pytest.approx(answers["b"] / (answers["a"] / 2), abs=0.1)
    [row] = [dict(zip(report.STUDY_HEAD, row, strict=True)) for row in report.study_table([run])]
    assert row["LEAST/MOST"] == f"{run.fairness:.2f}"
    [run] = study.study(study.profiles(["mixed"], 1), ["eager"])
    assert run.fairness is None
    assert [row[-2:] for row in report.study_table([run])] == [("-", "0")]


def test_logs_are_kept_only_for_those_who_want_them():
    cases = [*study.profiles(["single"], 1)]
    assert [len(run.log) for run in study.study(cases, ["eager"])] == [0]
    assert [len(run.log) for run in study.study(cases, ["eager"], keep_logs=True)] == [1 + 40 + 40]


# Event logs of a running program


def recorded(*logs, config, apart=1000.0):
    runs = [eventlog.LoggedRun(eventlog.header(config, 5.0 + n * apart), log) for n, log in enumerate(logs)]
    return Recording("week", runs, None)


WORLD = Config((Backend("a", "a", ("0",)), Backend("b", "b", ("0",))), policy="eager", max_wait=20.0)
LOG = simulate(WORLD, [Arrival(1.0, "a", 4.0), Arrival(2.0, "b", 1.0)], Engines({"a": 3.0, "b": 6.0}))


def test_what_ran_is_told_as_it_was_beside_what_another_policy_would_have_done():
    recording = recorded(LOG, config=WORLD)
    was = recording.run(checked=True)
    assert (was.policy, was.wrong, was.figures) == (LOGGED, [], figures(LOG))
    again = study.run(recording.case(), "eager")
    assert again.figures == was.figures
    late = study.run(recording.case(), "time_slice").figures
    assert late.wait_mean_seconds > was.figures.wait_mean_seconds


def test_a_log_simulated_under_its_own_policy_is_the_same_whatever_engines_do_at_once():
    busy = [Arrival(n / 4, "ab"[n % 7 == 6], 1.0 + n % 3) for n in range(40)]
    for batching in (UNLIMITED, AssumedBatching(), AssumedBatching(0.5, 3)):
        engines = Engines({"a": 3.0, "b": 6.0})
        log = simulate(WORLD, busy, engines, batching=batching.of_backends(WORLD))
        again = study.run(recorded(log, config=WORLD).case(batching), "eager")
        ends, same = (
            [(event.model, event.at) for event in each if event.kind == "released"]
            for each in (log, again.log)
        )
        assert [model for model, _ in same] == [model for model, _ in ends]
        assert [at for _, at in same] == pytest.approx([at for _, at in ends])


def test_several_starts_of_the_program_are_one_log():
    was = recorded(LOG, LOG, config=WORLD).run(checked=False)
    assert (was.figures.requests, was.figures.swaps) == (4, 4)
    assert was.figures.makespan_seconds == 1000.0 + figures(LOG).makespan_seconds
    assert [event.at for event in was.log] == sorted(event.at for event in was.log)


def test_a_broken_log_is_noticed_when_it_is_checked():
    broken = [event for event in LOG if event.kind != "draining"]
    recording = recorded(LOG, broken, config=WORLD)
    assert recording.run(checked=False).row()["violations"] is None
    assert any("it was ready" in line for line in recording.run(checked=True).wrong)


@pytest.mark.parametrize(("queue_timeout", "broken"), [(11.5, 1), (12.5, 0)])  # b waited 13 s
def test_a_log_is_checked_against_the_compose_file_and_threads_may_be_a_little_late(queue_timeout, broken):
    recording = replace(recorded(LOG, config=WORLD), config=replace(WORLD, queue_timeout=queue_timeout))
    assert len(recording.run(checked=True).wrong) == broken


def test_a_log_is_checked_against_a_compose_file_that_lacks_its_backends_and_that_is_told():
    other = replace(WORLD, backends=tuple([replace(each, name=f"{each.name}-2") for each in WORLD.backends]))
    wrong = replace(recorded(LOG, config=WORLD), config=other).run(checked=True).wrong
    assert any(line.endswith("the configuration has no such backend or model") for line in wrong)


def test_an_eviction_that_is_not_here_is_told_and_another_can_be_named():
    config = replace(WORLD, eviction="nobody_has_it:Rule")
    case = recorded(LOG, config=config).case()
    with pytest.raises(
        ConfigError, match=r"eviction nobody_has_it:Rule: cannot be imported: .*; --eviction or"
    ):
        study.run(case, "eager")
    [other] = study.under_evictions(case, ["lru"])
    assert study.run(other, "eager").figures.requests == 2


def test_an_empty_log_is_told(tmp_path):
    (tmp_path / "events").touch()
    with pytest.raises(eventlog.BadLog, match="events: is empty"):
        read(str(tmp_path / "events"), None, print)

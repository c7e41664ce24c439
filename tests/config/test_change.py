"""What becomes of backends and settings when the configuration is another."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from anvil_mux.config.change import LIVE, Change, compare, within
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS, Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.config.service import PlacedFile, Service
from anvil_mux.plugins import load


def backend(name, **fields):
    return Backend(name, fields.pop("model", name), fields.pop("gpus", ("0",)), **fields)


A, B = backend("a"), backend("b")
OLD = Config((A, B), gpus=(Gpu("0"), Gpu("1")))


def test_the_same_configuration_changes_nothing():
    assert compare(OLD, OLD) == Change(kept=("a", "b"))
    assert str(compare(OLD, OLD)) == "nothing has changed"


def test_backends_come_go_and_stay():
    found = compare(OLD, replace(OLD, backends=(B, backend("c"))))
    assert found == Change(kept=("b",), removed=("a",), added=("c",))
    assert str(found) == "removed a; added c"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpus", ("1",)),
        ("model", "other"),
        ("engine", "vllm"),
        ("vram", 7),
        ("evict_to", ("sleep",)),
        ("port", 1),
    ],
)
def test_what_concerns_its_engine_or_its_place_makes_it_another_one(field, value):
    assert compare(OLD, replace(OLD, backends=(replace(A, **{field: value}), B))).changed == ("a",)


@pytest.mark.parametrize("field", LIVE)
def test_what_steers_us_alone_leaves_it_running(field):
    other = {"profile": object(), "pin": True, "preload": True, "checkpoint_anyway": True}.get(field, "other")
    found = compare(OLD, replace(OLD, backends=(replace(A, **{field: other}), B)))
    assert found == Change(kept=("a", "b"), settings=(f"a.{field}",))


def test_any_word_of_its_description_makes_it_another_one():
    described = replace(A, service=Service(digest="1")), replace(A, service=Service(digest="2"))
    assert described[0] == described[1]
    old, new = (replace(OLD, backends=(each, B)) for each in described)
    assert compare(old, new).changed == ("a",)


def test_another_secret_is_news_and_leaves_what_runs_running():
    placed = PlacedFile("/run/secrets/s", "two", "TOKEN")
    new = replace(OLD, backends=(replace(A, service=replace(A.service, files=(placed,))), B))
    change = compare(OLD, new)
    assert (change.kept, change.settings) == (("a", "b"), ("a.secrets and configs",))
    assert "two" not in str(change)


def test_names_that_are_exchanged_are_two_changes():
    one, other = backend("a", port=1), backend("b", port=2)
    swapped = replace(one, name="b", model="b"), replace(other, name="a", model="a")
    assert compare(Config((one, other)), Config(swapped)).changed == ("a", "b")


def test_a_gpu_whose_memory_is_declared_anew_changes_who_is_on_it():
    on_one = backend("c", gpus=("1",))
    old = Config((A, on_one), gpus=(Gpu("0", 24), Gpu("1", 24)))
    found = compare(old, replace(old, gpus=(Gpu("0", 24, reserve=1), Gpu("1", 24))))
    assert (found.changed, found.kept, found.settings) == (("a",), ("c",), ("gpus",))


def test_settings_of_the_whole_are_told_by_their_keys():
    new = replace(OLD, policy="eager", drain_timeout=3.0, routing_policies={"mine": {}})
    assert compare(OLD, new).settings == ("policy", "routing", "drain_timeout")


def test_what_is_built_into_what_runs_waits_for_the_next_start():
    new = replace(OLD, port=1, max_queue=7, routing_mode="full", routing="session")
    found = compare(OLD, new)
    assert (found.settings, found.later) == (("routing", "max_queue"), ("listen", "routing"))
    assert str(found) == "set routing, max_queue; only at the next start listen, routing"
    kept = within(OLD, new)
    assert (kept.port, kept.routing_mode, kept.routing, kept.max_queue) == (9292, "lite", "session", 7)


def test_certificates_may_move_but_encryption_is_not_begun():
    plain, moved = OLD, replace(OLD, tls_cert="/c", tls_key="/k")
    assert compare(plain, moved).later == ("tls_cert", "tls_key")
    assert within(plain, moved).tls_cert is None
    again = replace(moved, tls_cert="/other")
    assert compare(moved, again).settings == ("tls_cert",)
    assert within(moved, again).tls_cert == "/other"


def test_a_file_that_says_something_else_is_told_under_the_setting_that_names_it():
    old = replace(OLD, key_file="/keys", tls_cert="/c", tls_key="/k", said={"key_file": "1", "tls_cert": "2"})
    assert compare(old, replace(old, said={"key_file": "1", "tls_cert": "3"})).settings == ("tls_cert",)
    assert str(compare(old, replace(old, said={"key_file": "9", "tls_cert": "2"}))) == "set key_file"
    found = compare(OLD, old)
    assert (found.settings, found.later) == (("key_file",), ("tls_cert", "tls_key"))


def test_every_field_of_a_configuration_is_told_of_under_some_key():
    told = {name for key, setting in SETTINGS.items() for name in setting.fields_of(key)}
    of_compose = {"generated_compose", "resolved_compose", "compose_variables"}
    untold = {"backends", "files", "warnings", "origins", "said", *of_compose}
    assert {field.name for field in fields(Config)} - told == untold
    assert {field.name for field in fields(Backend)} >= set(LIVE)


SERVICE = """
x-anvil: {{runtime: process, gpus: ["0"]}}
services:
  a: {a}
"""


def digest(tmp_path, a):
    file = tmp_path / "compose.yaml"
    file.write_text(SERVICE.format(a=a))
    return load([file], environ={}).backends[0].service.digest


@pytest.mark.parametrize(
    "other",
    [
        "{command: [b], x-anvil: {}}",
        "{command: [a], volumes: [./here:/there], x-anvil: {}}",
        "{command: [a], labels: {theirs: 1}, x-anvil: {}}",
    ],
)
def test_the_digest_has_all_that_a_service_says(tmp_path, other):
    assert digest(tmp_path, "{command: [a], x-anvil: {}}") != digest(tmp_path, other)


def test_the_digest_has_nothing_of_what_is_said_to_us(tmp_path):
    plain = digest(tmp_path, "{command: [a], tty: true, x-anvil: {}}")
    assert plain == digest(tmp_path, "{x-anvil: {ttl: 5m}, tty: true, command: [a]}")
    assert plain == digest(tmp_path, "{command: [a], labels: {anvil.ttl: 5m}, tty: true, x-anvil: {}}")


RUNNING = (Path(__file__).resolve().parents[2] / "docs" / "running.md").read_text()


def test_the_documents_say_which_settings_wait_for_the_next_start():
    (row,) = [
        line for line in RUNNING.splitlines() if line.endswith("| at the next start; `reload` says so |")
    ]
    told = set(re.findall("`([a-z_]+)`", row.rpartition("| at")[0]))
    waiting = {key for key, setting in SETTINGS.items() if not setting.live}
    parts = {name.removeprefix("routing_") for setting in SETTINGS.values() for name in setting.later}
    assert told == waiting | parts


def test_the_documents_name_settings_of_services_where_they_belong():
    steering, replacing = (
        {key for key in re.findall("`([a-z_]+)`", line) if key in SERVICE_SETTINGS}
        for line in RUNNING.splitlines()
        if "the engine runs on |" in line or line.startswith("| anything else of its service changes")
    )
    assert steering
    assert all(SERVICE_SETTINGS[key].live for key in steering)
    assert replacing
    assert not any(SERVICE_SETTINGS[key].live for key in replacing)

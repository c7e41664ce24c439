"""Simulated engines and what is measured of engines."""

from dataclasses import asdict

import pytest

from anvil_mux.config.values import Profile
from anvil_mux.lab.engines import SimulatedEngine, fitted, measured


def test_an_engine_that_is_measured_and_fitted_is_itself():
    engine = SimulatedEngine(ingress_token_seconds=0.0)
    for made in (engine, SimulatedEngine(0.01, 0.0, 0.02, 1e-4, 0.0, 1e-3, 0.0, 4096, 16, 100_000)):
        found = asdict(fitted(measured(made), made))
        assert found == pytest.approx(asdict(made), rel=1e-6, abs=1e-12)


def test_a_fitted_engine_keeps_what_no_profile_holds():
    made = fitted(measured(SimulatedEngine()), SimulatedEngine(kv_tokens=5000, max_running=4))
    assert (made.kv_tokens, made.max_running) == (5000, 4)


def test_a_profile_of_one_prompt_and_one_batch_is_fitted_too():
    profile = Profile(((0.0, 0.0), (1000.0, 500.0)), ((1, ((1000.0, 20.0),)),), 1000)
    again = measured(fitted(profile))
    assert again.first_token(1000, 0, 0) == pytest.approx(500.0)
    assert again.next_token(1, 1000) == pytest.approx(20.0)


def test_no_parameter_is_below_nothing():
    """More requests at once that take less each: something disturbed the measurement."""
    odd = Profile(
        ((0.0, 0.0), (100.0, 50.0), (1000.0, 400.0)), ((1, ((100.0, 20.0),)), (2, ((100.0, 18.0),))), 1000
    )
    assert min(asdict(fitted(odd)).values()) >= 0

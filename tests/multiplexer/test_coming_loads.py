"""The loads that queues wait for, asked of the running multiplexer; in virtual time."""

from anvil_mux.config.config import Config
from tests.lab.test_simulate import one
from tests.multiplexer.stage import Stage

THREE = Config(policy="eager", backends=tuple(one(name, "0") for name in "abc"))


def test_loads_are_waited_for_until_they_begin_the_next_one_first():
    def main(stage):
        def coming(models="abc?"):
            queued, backends = stage.mux.overview.coming_loads(models)
            return "".join(queued), "".join(each.name for each in backends)

        assert coming() == ("", "")
        stage.request(0.0, "a", seconds=20.0)
        stage.clock.sleep(1.0)
        assert (stage.states()["a"], coming()) == ("loading", ("a", ""))
        stage.request(4.0, "c", seconds=1.0)
        stage.request(5.0, "b", seconds=1.0)
        stage.clock.sleep(9.0)
        assert (stage.states()["a"], coming()) == ("draining", ("bc", "cb"))
        assert coming("b") == ("b", "b")
        stage.clock.sleep(16.0)
        assert (stage.states()["c"], coming()) == ("loading", ("bc", "b"))
        stage.clock.sleep(100.0)
        assert coming() == ("", "")

    Stage(THREE).play(main)

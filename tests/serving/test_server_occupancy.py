"""The gauge of a server under load; idle is not a number and no reading."""

import time

from cglab.serving.occupancy import Watch, watch_occupancy
from tests.serving.stand_in import StandIn

LINE = 'sglang:fwd_occupancy{{model_name="m",tp_rank="0"}} {value}\nsglang:fwd_occupancy{{tp_rank="1"}} 1.0\n'


def test_p83_idle_readings_are_left_out_and_each_point_has_its_own():
    watch = Watch(0.5)
    for value in ("NaN", 80.0, 82.0, "NaN", 84.0, 81.0, 83.0):
        watch.add(f"# HELP sglang:fwd_occupancy x\n{LINE.format(value=value)}")
    watch.add("sglang:other 7.0\n")
    taken = watch.take()
    assert taken.values == (80.0, 82.0, 84.0, 81.0, 83.0) and taken.median == 82.0 and taken.every == 0.5
    assert watch.take().values == () and watch.take().median is None


def test_it_is_read_while_the_server_is_driven_and_ends_with_it():
    server = StandIn({"/metrics": LINE.format(value=50.0)})
    with watch_occupancy(server, interval=0.01) as watch:
        time.sleep(0.3)
        assert watch.take().median == 50.0
        server.living = False  # a dead server is told by who drives it
        time.sleep(0.1)
        watch.take()
        server.living = True
        time.sleep(0.1)
        assert watch.take().values == ()

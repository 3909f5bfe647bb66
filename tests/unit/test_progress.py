"""The progress bar redraws one line on a terminal and writes a line now and then elsewhere."""

import io

from osdp_ray.reporting.progress import ProgressBar
from osdp_ray.units import MIB


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def advance(bar, clock, steps, *, seconds_each=1.0, peak_bytes=None):
    for step in steps:
        clock.now_s += seconds_each
        bar.update(step=step, loss=2.5, num_samples=8, step_s=seconds_each, peak_bytes=peak_bytes)


def test_a_line_tells_step_loss_speed_peak_against_budget_and_time_left():
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(stream, 4, 200 * MIB, clock=clock)
    advance(bar, clock, [1], peak_bytes=150 * MIB)
    assert stream.getvalue() == ("step 1/4  loss 2.5000  8.0 samples/s  peak 150.00 MiB of 200.00 MiB  3.00 s left\n")


def test_without_a_terminal_a_line_comes_every_tenth_and_at_the_end():
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(stream, 100, MIB, clock=clock)
    advance(bar, clock, range(1, 101), seconds_each=0.01)
    bar.close()
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in stream.getvalue().splitlines()]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


def test_without_a_terminal_slow_steps_still_show_every_five_seconds():
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(stream, 1000, MIB, clock=clock)
    advance(bar, clock, range(1, 11), seconds_each=2.0)
    assert len(stream.getvalue().splitlines()) == 4  # after 2, 8, 14 and 20 s


def test_on_a_terminal_one_line_is_redrawn_and_ended_by_close():
    clock, stream = Clock(), Terminal()
    bar = ProgressBar(stream, 3, MIB, clock=clock)
    advance(bar, clock, [1, 2])
    bar.note("saved step 2")
    advance(bar, clock, [3])
    bar.close()
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert text.endswith("\n")
    assert "\r[####################]  step 3/3" in text
    assert "saved step 2\n" in text


def test_the_peak_is_the_highest_so_far():
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(stream, 2, 4 * MIB, clock=clock)
    advance(bar, clock, [1], peak_bytes=3 * MIB)
    advance(bar, clock, [2], peak_bytes=2 * MIB)
    assert stream.getvalue().splitlines()[1].endswith("peak 3.00 MiB of 4.00 MiB")


def test_close_writes_the_last_step_if_it_was_not_written():
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(stream, 1000, MIB, clock=clock)
    advance(bar, clock, [1, 2, 3], seconds_each=0.1)
    bar.close()
    assert stream.getvalue().splitlines()[-1].startswith("step 3/1000")

from __future__ import annotations

import numpy as np
import pytest

from octavo.config import SchedulerConfig
from octavo.engine.plan import Kind, Room, plan_running
from octavo.engine.table import RequestTable
from octavo.plugin.data import ScheduleLimits


def running(*wants, limit=1000):
    """A table whose row i has 10 * i positions scheduled and wants wants[i] more."""
    table = RequestTable(len(wants))
    table.scheduled[:] = 10 * np.arange(len(wants))
    table.target[:] = table.scheduled + wants
    table.limit[:] = limit
    return table


def plan(table, *, budget=100, kind=Kind.ANY, **limits):
    config = SchedulerConfig(max_num_batched_tokens=budget)
    rows = np.arange(table.num_rows)
    return plan_running(table, rows, kind, config, ScheduleLimits(**limits))


def pairs(p):
    return list(zip(p.rows.tolist(), p.counts.tolist(), strict=True))


def test_steady_decode_takes_all_rows_as_they_are():
    p = plan(running(1, 1, 1))
    assert p.steady
    assert pairs(p) == [(0, 1), (1, 1), (2, 1)]
    assert p.starts.tolist() == [0, 10, 20]
    assert p.ends.tolist() == [1, 11, 21]


def test_no_rows_is_an_empty_plan():
    assert pairs(plan(RequestTable(0))) == []


def test_single_tokens_go_first_and_the_rest_share_what_is_left():
    p = plan(running(9, 1, 7, 1), budget=12)
    assert pairs(p) == [(1, 1), (3, 1), (0, 9), (2, 1)]
    assert not p.steady


def test_budget_below_the_number_of_decodes_serves_the_first():
    assert pairs(plan(running(1, 1, 1, 1), budget=2)) == [(0, 1), (1, 1)]


def test_rows_that_await_their_last_token_or_have_all_in_flight_get_nothing():
    table = running(1, 0, 1, 1)
    table.limit[2] = table.target[2]
    assert pairs(plan(table)) == [(0, 1), (3, 1)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Kind.ONE, [(1, 1), (3, 1)]), (Kind.MANY, [(0, 5), (2, 5)]), (Kind.ANY, [(1, 1), (3, 1), (0, 5), (2, 5)])],
)
def test_kind_chooses_rows(kind, expected):
    assert pairs(plan(running(5, 1, 5, 1), kind=kind)) == expected


def test_prefill_step_holds_no_chunk_of_one_token():
    assert pairs(plan(running(5, 1, 5), kind=Kind.MANY, budget=6)) == [(0, 5)]


def test_prefills_are_limited_but_decodes_are_not():
    assert pairs(plan(running(3, 1, 3, 3, 1), max_prefills_per_step=2)) == [(1, 1), (4, 1), (0, 3), (2, 3)]


def test_decodes_times_longest_context_stays_under_the_cap():
    # Contexts are 1, 11, 21, 31.
    assert pairs(plan(running(1, 1, 1, 1), max_batch_context_tokens=63)) == [(0, 1), (1, 1), (2, 1)]
    assert pairs(plan(running(1, 1, 1, 1), max_batch_context_tokens=62)) == [(0, 1), (1, 1)]


def test_one_decode_runs_however_long_it_is():
    table = running(1, 1)
    table.scheduled += 500
    table.target += 500
    assert pairs(plan(table, max_batch_context_tokens=100)) == [(0, 1)]


def room(p, *, budget=20, chunked=True, kind=Kind.ANY, **limits):
    config = SchedulerConfig(max_num_batched_tokens=budget, enable_chunked_prefill=chunked)
    return Room(p, kind, config, ScheduleLimits(**limits))


def test_new_sequence_gets_what_the_plan_left():
    r = room(plan(running(1, 5)))
    assert r.offer(30, context=30) == 14
    r.take(10, context=10)
    assert r.offer(30, context=30) == 4


def test_prompt_that_may_not_be_cut_waits_for_a_step_that_holds_it():
    r = room(plan(running(1, 5)), chunked=False)
    assert r.offer(14, context=14) == 14
    assert r.offer(15, context=15) == 0


def test_sequence_longer_than_any_step_is_cut_when_it_has_the_step_to_itself():
    assert room(plan(running(1)), chunked=False).offer(21, context=21) == 0
    assert room(plan(RequestTable(0)), chunked=False).offer(21, context=21) == 20


def test_new_sequences_obey_the_limits_too():
    p = plan(running(1, 5))
    assert room(p, max_prefills_per_step=1).offer(5, context=5) == 0
    assert room(p, max_prefills_per_step=1).offer(1, context=9) == 1
    assert room(p, kind=Kind.ONE).offer(5, context=5) == 0
    assert room(p, kind=Kind.MANY).offer(1, context=5) == 0
    assert room(p, max_batch_context_tokens=10).offer(1, context=5) == 1
    assert room(p, max_batch_context_tokens=10).offer(1, context=6) == 0

"""Tier 0: the plugin is a good guest. Judged in fresh processes, as this one has loaded much already.

Only its last tests serve with the device; the others run without one too.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import pytest
import torch

from octavo.config import make_config
from octavo.features import WORDS
from octavo.plugin import PlatformCaps
from octavo.plugin.version import refusal
from octavo.testing.conformance.journal import ending
from octavo.testing.conformance.subject import ENVIRONMENT, Subject, absence, needs_device

pytestmark = pytest.mark.no_device

HEAVY = ("torch", "transformers", "triton", "jax", "tensorflow", "numba")

NUM_MORE_PROBES = 3

OPEN = """
import json, os, sys, time
import octavo.discovery as discovery
environment, start = dict(os.environ), time.perf_counter()
plugin = discovery.installed({name!r})._plugin
first = plugin.probe()
seconds = time.perf_counter() - start
second = plugin.probe()
print(json.dumps({{
    "heavy": [name for name in {heavy!r} if name in sys.modules],
    "environment": sorted(key for key in {{*environment, *os.environ}} if environment.get(key) != os.environ.get(key)),
    "seconds": seconds,
    "same": first == second,
}}))
"""


@pytest.fixture(scope="module")
def opened(subject: Subject) -> dict[str, object]:
    """What a fresh process sees when it imports and probes the platform."""
    assert subject.platform is not None
    return open_afresh(subject)


def open_afresh(subject: Subject) -> dict[str, object]:
    return run_fresh(subject, "-c", OPEN.format(name=subject.name, heavy=HEAVY))


def run_fresh(subject: Subject, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a Python that knows no plugin prints last, as JSON, with `environment` on top of the usual one."""
    # It ends before the kit's own process is ended for waiting, so that nothing stays behind.
    limit = 0.9 * subject.settings.limit("test")
    command, env = [sys.executable, *arguments], ENVIRONMENT | environment
    try:
        done = subprocess.run(command, text=True, capture_output=True, check=False, env=env, timeout=limit)
    except subprocess.TimeoutExpired:
        pytest.fail(f"a fresh process did not end within {limit:g} seconds")
    assert done.returncode == 0, (done.stderr.strip().splitlines() or [ending(done.returncode)])[-1]
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def test_import_and_probe_load_nothing_heavy(opened: dict[str, object]) -> None:
    assert opened["heavy"] == [], "import heavy packages inside the hooks that need them"


def test_import_and_probe_leave_the_environment_alone(opened: dict[str, object]) -> None:
    assert opened["environment"] == [], "environment of workers belongs into WorkerLaunch.env"


def test_probe_is_quick(subject: Subject, opened: dict[str, object]) -> None:
    limit = subject.settings.limit("probe")
    seconds = float(str(opened["seconds"]))
    for _ in range(NUM_MORE_PROBES):
        # What else the machine does takes time too, but not every time.
        if seconds >= limit:
            seconds = min(seconds, float(str(open_afresh(subject)["seconds"])))
    assert seconds < limit, f"import plus probe took {seconds:.2f} s of {limit:g}: every command line waits for it"


def test_probe_gives_the_same_answer_twice(opened: dict[str, object]) -> None:
    assert opened["same"]


ABSENT = """
import json
from octavo.discovery import survey
[found] = [report for report in survey() if report.name == {name!r}]
print(json.dumps({{"state": found.state, "reason": found.reason}}))
"""


def test_absent_hardware_is_an_answer_with_a_reason(subject: Subject) -> None:
    hide = subject.settings.absent
    if not hide and not absence(subject.name):
        pytest.skip("conformance.toml does not say how to hide the hardware: [absent] with environment variables")
    found = run_fresh(subject, "-c", ABSENT.format(name=subject.name), **hide)
    assert found["state"] == "absent", f"with {dict(hide)} the platform is {found['state']}: {found['reason']}"
    assert found["reason"], "an absent platform must say what was not found: Probe(available=False, reason=...)"


def test_it_opens_with_hooks_of_this_plugin_api(subject: Subject) -> None:
    # Opening refuses hooks and arguments of hooks that the API does not have, and misses those that it must.
    info = subject.platform.info
    assert refusal(info.api) == ""
    assert info.name == subject.name
    assert info.version


DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
FP8 = frozenset({"e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"})
COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"})


def test_capabilities_are_well_formed(subject: Subject) -> None:
    caps = subject.platform.caps
    assert caps.dtypes
    assert set(caps.dtypes) <= DTYPES, f"dtypes: torch's names of {', '.join(sorted(DTYPES))}"
    assert caps.kv_dtypes, "kv_dtypes: at least 'auto', the model's own"
    for name in caps.kv_dtypes:
        known = name == "auto" or isinstance(getattr(torch, name, None), torch.dtype)
        assert known, f"kv_dtypes: torch's names or 'auto', not {name!r}"
    for name in ("graph", "shapes"):
        words = get_args(get_type_hints(PlatformCaps)[name])
        assert getattr(caps, name) in words, f"{name}: of {', '.join(words)}, not {getattr(caps, name)!r}"
    assert caps.features <= WORDS, f"features: of {', '.join(sorted(WORDS))}, not {sorted(caps.features - WORDS)}"
    assert caps.fp8 <= FP8, f"fp8: of {', '.join(sorted(FP8))}"
    assert caps.collectives <= COLLECTIVES, f"collectives: of {', '.join(sorted(COLLECTIVES))}"
    assert caps.max_world_size >= 1
    assert caps.max_world_size == 1 or caps.dist_backend, "several ranks need a dist_backend"
    limits = caps.schedule
    sizes = [size if isinstance(size, int) else size.value for size in limits.block_sizes]
    assert sizes, "schedule.block_sizes: at least one"
    assert min(*sizes, limits.token_multiple, limits.seq_multiple) >= 1
    if caps.buckets is not None:
        for steps in (caps.buckets.num_tokens, caps.buckets.num_seqs, caps.buckets.max_context):
            assert list(steps) == sorted(set(steps)), "sizes of buckets rise"


def test_changes_of_the_config_are_allowed_and_have_reasons(subject: Subject) -> None:
    platform = subject.platform
    config, log = platform.configure(make_config(platform=subject.name))
    assert all(line.rpartition(": ")[2].strip() for line in log), f"a ConfigPatch without a reason: {log}"
    assert platform.configure(make_config(platform=subject.name)) == (config, log), "asked twice, it answers the same"


def test_every_option_is_documented_and_has_a_default(subject: Subject) -> None:
    for name, spec in subject.platform.info.options.items():
        assert spec.help, f"option {name} has no help"
        assert callable(spec.type), f"option {name}: type must be a callable that parses text"


def test_platform_launch_is_answered(subject: Subject) -> None:
    launch = subject.platform.launch(subject.config)
    assert launch.start_method in multiprocessing.get_all_start_methods()
    if launch.env is not None:
        assert all(isinstance(value, str) for value in launch.env(0, 1).values())


def test_a_spawned_worker_can_load_the_locked_platform(subject: Subject) -> None:
    lock = subject.platform.lock
    assert pickle.loads(pickle.dumps(lock)) == lock
    code = (
        "import pickle, json, sys\nfrom octavo.discovery import load\n"
        f"lock = pickle.loads({pickle.dumps(lock)!r})\n"
        "print(json.dumps({'version': load(lock).info.version}))"
    )
    assert run_fresh(subject, "-c", code) == {"version": subject.platform.info.version}


@pytest.fixture(scope="module")
def patched(subject: Subject) -> dict[str, Any]:
    """What loading the platform and serving a request with it changed, in a fresh process."""
    assert subject.platform is not None
    flags = ["--no-device"] if subject.no_device else []
    facts = run_fresh(subject, "-m", "octavo.testing.conformance.patches", subject.name, *flags)
    subject.changed_by_backend = facts["backend"]
    return facts


@pytest.mark.parametrize("stage", ["loading", "serving"])
def test_nothing_outside_the_plugin_is_patched(subject: Subject, patched: dict[str, list[str]], stage: str) -> None:
    if subject.no_device and stage == "serving":
        pytest.skip(needs_device(subject))
    names = patched[stage]
    assert names == [], f"{stage} changed {len(names)}: {', '.join(names[:10])}"


def test_a_request_is_served_in_a_fresh_process(subject: Subject, patched: dict[str, object]) -> None:
    if subject.no_device:
        pytest.skip(needs_device(subject))
    assert not patched["error"], patched["error"]

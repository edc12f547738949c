"""Tier 0: the plugin is a good guest. Judged in fresh processes, as this one has loaded much already."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys

import pytest

from octavo.testing.conformance.subject import ENVIRONMENT, Subject

HEAVY = ("torch", "transformers", "triton", "jax", "tensorflow", "numba")

OPEN = """
import json, os, sys, time
import octavo.discovery as discovery
environment, start = dict(os.environ), time.process_time()
plugin = discovery.select({name!r})._plugin
first, second = plugin.probe(), plugin.probe()
print(json.dumps({{
    "heavy": [name for name in {heavy!r} if name in sys.modules],
    "environment": sorted(key for key in {{*environment, *os.environ}} if environment.get(key) != os.environ.get(key)),
    "seconds": (time.process_time() - start) / 3,
    "same": first == second,
}}))
"""


@pytest.fixture(scope="module")
def opened(subject: Subject) -> dict[str, object]:
    """What a fresh process sees when it imports and probes the platform."""
    assert subject.platform is not None
    return run_fresh(OPEN.format(name=subject.name, heavy=HEAVY))


def run_fresh(code: str, **environment: str) -> dict[str, object]:
    """Run code in a process that knows no plugin, with `environment` on top of the usual one."""
    env = ENVIRONMENT | environment
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False, env=env)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    facts: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def test_import_and_probe_load_nothing_heavy(opened: dict[str, object]) -> None:
    assert opened["heavy"] == [], "import heavy packages inside the hooks that need them"


def test_import_and_probe_leave_the_environment_alone(opened: dict[str, object]) -> None:
    assert opened["environment"] == [], "environment of workers belongs into WorkerLaunch.env"


def test_probe_is_quick(subject: Subject, opened: dict[str, object]) -> None:
    limit = subject.settings.max_seconds.get("probe", 1.0)
    assert float(str(opened["seconds"])) < limit, "import plus probe must be quick: every command line waits for it"


def test_probe_gives_the_same_answer_twice(opened: dict[str, object]) -> None:
    assert opened["same"]


ABSENT = """
import json
from octavo.discovery import survey
[found] = [report for report in survey() if report.name == {name!r}]
print(json.dumps({{"state": found.state, "reason": found.reason}}))
"""


def test_absent_hardware_is_an_answer_with_a_reason(subject: Subject) -> None:
    assert subject.platform is not None
    hide = subject.settings.absent
    if not hide:
        pytest.skip("conformance.toml does not say how to hide the hardware: [absent] with environment variables")
    found = run_fresh(ABSENT.format(name=subject.name), **hide)
    assert found["state"] == "absent", f"with {dict(hide)} the platform is {found['state']}: {found['reason']}"
    assert found["reason"], "an absent platform must say what was not found: Probe(available=False, reason=...)"


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
    assert run_fresh(code) == {"version": subject.platform.info.version}


@pytest.fixture(scope="module")
def patched(subject: Subject) -> dict[str, object]:
    """What loading the platform and serving a request with it changed, in a fresh process."""
    assert subject.platform is not None
    command = [sys.executable, "-m", "octavo.testing.conformance.patches", subject.name]
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    facts: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


@pytest.mark.parametrize("stage", ["loading", "serving"])
def test_nothing_outside_the_plugin_is_patched(patched: dict[str, list[str]], stage: str) -> None:
    names = patched[stage]
    assert names == [], f"{stage} changed {len(names)}: {', '.join(names[:10])}"


def test_a_request_is_served_in_a_fresh_process(patched: dict[str, object]) -> None:
    assert not patched["error"], patched["error"]

"""`octavo explain MODEL`: which kernel serves each op, why not the others, and where the memory goes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import config_from, engine_options
from octavo.cli.table import columns, size

if TYPE_CHECKING:
    from octavo.runner.worker import Worker


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@engine_options
def explain(as_json: bool, **flags: Any) -> None:
    """Load MODEL on the platform as `serve` would, and show what was chosen and why."""
    from octavo.launch import activate, build_ranks

    config, platform = activate(config_from(flags))
    worker = build_ranks(config, platform)
    facts = report(str(platform), worker)
    worker.executor.close()
    click.echo(json.dumps(facts, indent=2) if as_json else text(facts))


def report(platform: str, worker: Worker) -> dict[str, Any]:
    """What is shown, as plain data."""
    return {
        "platform": platform,
        "device": worker.device.describe().name,
        "model": str(worker.source.path),
        "dtype": worker.dtype,
        "kernels": [
            {"op": c.what, "context": c.context, "provider": c.provider, "why": c.why, "refused": dict(c.refused)}
            for c in worker.kernels.choices
        ],
        "kv": {
            "bytes": worker.kv_bytes,
            "groups": [
                {
                    "kind": plan.spec.kind,
                    "window": plan.spec.window,
                    "layers": plan.num_layers,
                    "blocks": plan.num_blocks,
                    "block_size": plan.spec.block_size,
                    "dtype": plan.spec.dtype,
                }
                for plan in worker.kv_plans
            ],
        },
        "limits": asdict(worker.limits),
    }


def text(facts: dict[str, Any]) -> str:
    """The report for people."""
    kernels = [
        (k["op"], k["context"], k["provider"], "; ".join(f"{name}: {why}" for name, why in k["refused"].items()))
        for k in facts["kernels"]
    ]
    reasons = [f"{k['op']} {k['provider']} ({k['context']}): {k['why']}" for k in facts["kernels"] if k["why"]]
    groups = [
        (g["kind"], g["window"] or "", g["layers"], g["blocks"], g["blocks"] * g["block_size"], g["dtype"])
        for g in facts["kv"]["groups"]
    ]
    limits = ", ".join(f"{name} {value}" for name, value in facts["limits"].items())
    return "\n".join(
        [
            f"{facts['model']} in {facts['dtype']} on {facts['platform']}, {facts['device']}",
            "",
            columns(("OP", "CONTEXT", "PROVIDER", "WHY NOT THE OTHERS"), kernels),
            "",
            *(reasons and [*reasons, ""]),
            f"KV memory: {size(facts['kv']['bytes'])}",
            columns(("KIND", "WINDOW", "LAYERS", "BLOCKS", "TOKENS", "DTYPE"), groups),
            "",
            f"Limits: {limits}",
        ]
    )

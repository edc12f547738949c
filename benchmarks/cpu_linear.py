"""Products of weights in memory, not in a cache, as a step finds them: the compiled kernels beside oneDNN.

    python benchmarks/cpu_linear.py [--threads 2] [--kinds bfloat16,Q4_0] [--tokens 1,64] [--shapes 960x576]

Each side has copies of its weight that together fill `--megabytes`, and takes them in turn; sides follow each other
within a row and the fastest round counts. oneDNN multiplies the plain bfloat16 weight, packed. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from octavo.plugin import LinearSpec
from octavo.plugin.torch import core_scheme
from octavo.quant.online import SCHEMES
from octavo_cpu import native
from octavo_cpu.device import CpuDevice
from octavo_cpu.linear import packed
from octavo_cpu.linear_native import GgufLinear, Int8Linear, PlainLinear

Product = Callable[[torch.Tensor], object]

SHAPES = "960x576,576x576,3072x576,576x1536,49152x576,2048x2048,11264x2048,2048x5632"
ROUNDS = 4
MOST = 200
"""Copies of one weight."""


def onednn(n: int, k: int) -> tuple[Product, int]:
    """oneDNN's product and the bytes of its weight."""
    multiply = packed(torch.randn(n, k).bfloat16())
    return (lambda x: multiply(x, None)), n * k * 2


def compiled(kind: str, n: int, k: int, device: CpuDevice) -> tuple[Product, int]:
    """The library's product and the bytes of its weight, unpadded."""
    scheme, size = None, n * k * 2
    weight = torch.randn(n, k).bfloat16()
    if kind in native.BLOCKS:
        columns, block = native.BLOCKS[kind]
        scheme, size = core_scheme(f"gguf:{kind}"), n * k // columns * block
        weight = torch.zeros(n, k // columns * block, dtype=torch.uint8)
    elif kind in SCHEMES:
        scheme, size = SCHEMES[kind], n * k
    spec = LinearSpec(in_features=k, out_features=n, act_dtype="bfloat16", out_dtype="bfloat16", scheme=scheme)
    kernel = GgufLinear() if kind in native.BLOCKS else Int8Linear() if kind in SCHEMES else PlainLinear()
    ready = kernel.prepare({"weight": weight}, spec, device)
    return (lambda x: kernel.apply(x, ready, None)), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="bfloat16")
    parser.add_argument("--tokens", default="1,4,16,64,256,2048")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--megabytes", type=int, default=150)
    args = parser.parse_args()
    device = CpuDevice(num_threads=args.threads)
    device.activate()
    print(f"{device.describe().name}, {args.threads} threads, {native.load().octavo_isa().decode()}")
    tokens = [int(t) for t in args.tokens.split(",")]
    print(
        "\n| weight | side | " + " | ".join(f"{t} tokens" for t in tokens) + " |\n|---|---" + "|---" * len(tokens) + "|"
    )
    for shape in args.shapes.split(","):
        n, k = map(int, shape.split("x"))
        sides: dict[str, tuple[list[Product], int]] = {}
        for name in ("oneDNN", *args.kinds.split(",")):
            if name in native.BLOCKS and k % native.BLOCKS[name][0]:
                continue
            product, size = onednn(n, k) if name == "oneDNN" else compiled(name, n, k, device)
            products = [product]
            while len(products) < min(MOST, args.megabytes * 10**6 // size):
                products.append(onednn(n, k)[0] if name == "oneDNN" else compiled(name, n, k, device)[0])
            sides[name] = products, size
        best = {name: [float("inf")] * len(tokens) for name in sides}
        for column, count in enumerate(tokens):
            x = torch.randn(count, k).bfloat16()
            for _ in range(ROUNDS):
                for name, (products, _) in sides.items():
                    few = products[: max(3, min(len(products), 2 * 10**11 // (2 * n * k * count)))]
                    time.sleep(0.01)  # until the other side's threads no longer wait on the cores
                    products[-1](x)
                    start = time.perf_counter()
                    for product in few:
                        product(x)
                    best[name][column] = min(best[name][column], (time.perf_counter() - start) / len(few))
        for name, (_, size) in sides.items():
            cells = (
                f"{seconds * 1e6:.0f} us, {size / seconds / 1e9:.1f} GB/s, {2 * n * k * t / seconds / 1e12:.2f} TFLOP/s"
                for t, seconds in zip(tokens, best[name], strict=True)
            )
            print(f"| {shape} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

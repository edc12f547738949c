"""The engines that replay the same work. Each is imported only in its own environment, when it is made.

All are set up for this work as their own documentation advises: greedy, ends of sequence ignored, no prefix cache,
64 sequences at once, contexts of 2,304 tokens, offline interfaces where there is one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

MAX_LEN = 2304
MAX_SEQS = 64
BATCHED_TOKENS = 4096


class Request(NamedTuple):
    """A prompt's token ids and how many tokens answer it."""

    prompt: list[int]
    num_output: int


class Engine(Protocol):
    """A loaded model. run: answer all requests, given at once; returns the number of output tokens."""

    version: str

    def run(self, requests: Sequence[Request]) -> int: ...
    def close(self) -> None: ...


class Octavo:
    """Offline API, the engine in this process. --option key=value are its engine arguments."""

    def __init__(self, args: argparse.Namespace) -> None:
        import octavo

        self.version = octavo.__version__
        settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS}
        settings |= {"platform": "cpu", "enable_prefix_caching": False, "threads": args.threads}
        settings["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
        self._llm = octavo.LLM(str(args.model), **settings | options(args))

    def run(self, requests: Sequence[Request]) -> int:
        from octavo import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=r.num_output, ignore_eos=True, detokenize=False)
            for r in requests
        ]
        outputs = self._llm.generate([r.prompt for r in requests], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    def close(self) -> None:
        self._llm.close()


class Vllm:
    """vLLM's CPU build, offline API, engine in this process. --option eager=1 leaves torch.compile out."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(args.kv_gib))))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self.version = vllm.__version__
        self._llm = vllm.LLM(
            str(args.model),
            dtype="bfloat16",
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=BATCHED_TOKENS,
            enable_prefix_caching=False,
            enforce_eager=options(args).get("eager") == 1,
            disable_log_stats=True,
        )

    def run(self, requests: Sequence[Request]) -> int:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=r.num_output, ignore_eos=True, detokenize=False) for r in requests
        ]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    def close(self) -> None:
        """Ends with the process."""


class OpenVino:
    """OpenVINO GenAI's continuous batching pipeline on a folder that `optimum-cli export openvino` wrote."""

    def __init__(self, args: argparse.Namespace) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self.version = openvino_genai.__version__
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, round(args.kv_gib))
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        scheduler.max_num_seqs = MAX_SEQS
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": args.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(args.model), scheduler, "CPU", properties | options(args)
        )

    def run(self, requests: Sequence[Request]) -> int:
        import numpy as np
        import openvino

        prompts = [openvino.Tensor(np.array([r.prompt], dtype=np.int64)) for r in requests]
        results = self._pipeline.generate(prompts, [self._how(r.num_output) for r in requests])
        return sum(len(result.m_generation_ids[0]) for result in results)

    def _how(self, num_output: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_output
        config.ignore_eos = True
        config.do_sample = False
        return config

    def close(self) -> None:
        """Ends with the process."""


class LlamaCpp:
    """llama.cpp's server, asked with token ids over loopback: the program that --server names, else the one that the
    package xllamacpp runs in this process. --option slots=16 requests run at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        chosen = {"slots": 16, "ubatch": 512} | options(args)
        self._process: subprocess.Popen[bytes] | None = None
        if args.server:
            self._address = self._start(args, chosen)
        else:
            self._address = self._embed(args, chosen)
        self._pool = ThreadPoolExecutor(MAX_SEQS)

    def _start(self, args: argparse.Namespace, chosen: dict[str, Any]) -> str:
        found = subprocess.run([args.server, "--version"], capture_output=True, text=True, check=True)
        self.version = (found.stdout + found.stderr).partition("version: ")[2].partition("\n")[0]
        port = 18080 + os.getpid() % 1000
        command = [args.server, "-m", str(args.model), "--host", "127.0.0.1", "--port", str(port), "--no-warmup"]
        command += ["-t", str(args.threads), "-tb", str(args.threads), "-np", str(chosen["slots"])]
        command += ["-c", str(MAX_LEN * chosen["slots"]), "-b", "2048", "-ub", str(chosen["ubatch"])]
        command += ["--no-kv-unified", "-cram", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        address = f"127.0.0.1:{port}"
        while not healthy(address):
            if self._process.poll() is not None:
                raise SystemExit(f"{args.server} ended with {self._process.returncode} before it served")
            time.sleep(0.02)
        return address

    def _embed(self, args: argparse.Namespace, chosen: dict[str, Any]) -> str:
        import xllamacpp

        self.version = f"{xllamacpp.__version__} ({xllamacpp.BUILD_INFO})"
        params = xllamacpp.CommonParams()
        params.model.path = str(args.model)
        params.hostnames, params.port = ["127.0.0.1"], 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
        params.n_parallel = chosen["slots"]
        params.n_ctx = MAX_LEN * chosen["slots"]
        params.n_batch, params.n_ubatch = 2048, chosen["ubatch"]
        params.kv_unified = params.warmup = params.cache_prompt = False
        params.cache_ram_mib = 0
        self._server = xllamacpp.Server(params)
        return str(self._server.listening_address).partition("://")[2]

    def run(self, requests: Sequence[Request]) -> int:
        if len(requests) == 1:
            return self._one(requests[0])
        return sum(self._pool.map(self._one, requests))

    def _one(self, request: Request) -> int:
        body = {"prompt": request.prompt, "n_predict": request.num_output, "temperature": 0, "ignore_eos": True}
        body |= {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "stream": False}
        connection = http.client.HTTPConnection(self._address, timeout=1200)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        if response.status != 200:
            raise SystemExit(f"llama.cpp answered {response.status}: {answer}")
        return int(answer["tokens_predicted"])

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def healthy(address: str) -> bool:
    try:
        connection = http.client.HTTPConnection(address, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


class Transformers:
    """`generate` in static batches, left-padded and sorted by output length, which suits it best."""

    BATCH = 16

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import transformers

        torch.set_num_threads(args.threads)
        self.version = transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def run(self, requests: Sequence[Request]) -> int:
        import torch

        ordered = sorted(requests, key=lambda r: r.num_output)
        with torch.inference_mode():
            for first in range(0, len(ordered), self.BATCH):
                group = ordered[first : first + self.BATCH]
                width = max(len(r.prompt) for r in group)
                longest = max(r.num_output for r in group)
                self._model.generate(
                    input_ids=torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in group]),
                    attention_mask=torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in group]),
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
        # A static batch computes past a request's end; only what was asked for counts.
        return sum(r.num_output for r in requests)

    def close(self) -> None:
        """Ends with the process."""


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "octavo": Octavo,
    "vllm": Vllm,
    "openvino": OpenVino,
    "llamacpp": LlamaCpp,
    "transformers": Transformers,
}


def options(args: argparse.Namespace) -> dict[str, Any]:
    """--option key=value; values are JSON where they can be."""
    found = {}
    for text in args.option:
        key, _, value = text.partition("=")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found

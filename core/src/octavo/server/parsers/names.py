"""The built-in formats by the names that `--tool-call-parser` and `--reasoning-parser` take.

They come in by the hook that a third party's would use (`octavo.builtin_extensions`).
"""

from __future__ import annotations

HERE = "octavo.server.parsers."

TOOLS: dict[str, str] = {
    name: HERE + target
    for names, target in (
        ("hermes qwen25 qwen3_json granite4", "json_formats:HERMES"),
        ("llama3_json llama4_json", "json_formats:LLAMA3"),
        ("mistral", "json_formats:MISTRAL"),
        ("mistral_list", "json_formats:MISTRAL_LIST"),
        ("granite", "json_formats:GRANITE"),
        ("granite-20b-fc", "json_formats:GRANITE_20B_FC"),
        ("phi4_mini_json", "json_formats:PHI4_MINI"),
        ("jamba", "json_formats:JAMBA"),
        ("internlm", "json_formats:INTERNLM"),
        ("xlam json", "json_formats:XLAM"),
        ("deepseek_v3", "json_formats:DEEPSEEK_V3"),
        ("deepseek_v31", "json_formats:DEEPSEEK_V31"),
        ("kimi_k2", "json_formats:KIMI_K2"),
        ("openai", "json_formats:HARMONY"),
        ("qwen3_coder qwen3_xml step3p5 nemotron_v3", "argument_formats:QWEN3_CODER"),
        ("seed_oss", "argument_formats:SEED_OSS"),
        ("glm45 glm47", "argument_formats:GLM"),
        ("minimax_m2", "argument_formats:MINIMAX_M2"),
        ("deepseek_v32", "argument_formats:DEEPSEEK_V32"),
        ("deepseek_v4", "argument_formats:DEEPSEEK_V4"),
        ("gemma4", "argument_formats:GEMMA4"),
        ("functiongemma", "argument_formats:FUNCTION_GEMMA"),
        ("pythonic", "argument_formats:PYTHONIC"),
        ("llama4_pythonic", "argument_formats:LLAMA4_PYTHONIC"),
        ("lfm2", "argument_formats:LFM2"),
        ("olmo3", "argument_formats:OLMO3"),
    )
    for name in names.split()
}

REASONING: dict[str, str] = {
    name: HERE + target
    for names, target in (
        ("qwen3 deepseek_v3 glm45 holo2 granite_thinking_parser nemotron_v3 mimo", "reasoning_formats:THINK"),
        ("deepseek_r1 kimi_k2 step3 minimax_m2 olmo3", "reasoning_formats:THINK_FIRST"),
        ("minimax_m2_append_think", "reasoning_formats:THINK_SHOWN"),
        ("seed_oss", "reasoning_formats:SEED_OSS"),
        ("mistral", "reasoning_formats:MISTRAL"),
        ("gemma4", "reasoning_formats:GEMMA4"),
        ("granite", "reasoning_formats:GRANITE"),
        ("hunyuan_a13b", "reasoning_formats:HUNYUAN_A13B"),
        ("ernie45", "reasoning_formats:ERNIE45"),
        ("openai_gptoss", "reasoning_formats:GPT_OSS"),
    )
    for name in names.split()
}

"""Chat templates that a request can name."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Turns between `<|im_start|>` and `<|im_end|>`, which the model's vocabulary should have as tokens."""
NAMED = {"chatml": CHATML}
RENDER_SECONDS = 10.0
"""Of CPU time that one text may take. The templates of known models take a millisecond for a usual conversation."""
UNENDED = (
    f"a chat template, or the tokenizer, did not end within {RENDER_SECONDS:g} s of CPU time, and its process with it: "
    "the template computes with huge numbers or texts in a single step, or tokenizer.json has a costly regular "
    "expression. Correct the files of the model's tokenizer (chat_template.jinja, or chat_template in "
    "tokenizer_config.json; tokenizer.json), or the provider option chat_template"
)
"""Why a process has ended by the signal of `system.cpu_timer`."""
OF_TRL = (
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma", "gemma3"),
    *("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe", "gptoss"),
    *("lfm2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2", "llama3", "llama3_1", "llama3_2", "muse_glimmer"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "phi3", "phi3_5"),
    *("qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    *("qwen3_instruct_2507", "qwen3_vl"),
)
"""Names of templates that TRL ships, and that the training process reads there: all that write the text of a turn."""

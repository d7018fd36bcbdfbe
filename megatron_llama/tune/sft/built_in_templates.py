"""The built-in chat templates by name. All mark answers by ``{% generation %}``, and render a
conversation so that its text only grows with each message.

Those of a family of models (``qwen2.5`` and the following) render a last answer like the models'
own template. Where that renders an answer differently when messages follow (Qwen3's leaves its
reasoning out, Phi-3's ends the text with a token), they render every answer as a last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_GENERAL = MappingProxyType(
    {
        # For tokenizers with only a begin and an end token. It needs no others: headers are text.
        "plain": (
            "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
            "{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
            "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
        ),
        "chatml": (
            "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
            "{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
            "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
        "llama2": (
            "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
            "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
            "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
            "{% for message in rest %}{% if message['role'] == 'user' %}"
            "{{ bos_token + '[INST] ' + (system if loop.first else '') + "
            "message['content'].strip() + ' [/INST]' }}"
            "{% elif message['role'] == 'assistant' %}"
            "{% generation %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% "
            "endgeneration %}"
            "{% else %}{{ raise_exception('Llama 2 knows no role ' + message['role']) "
            "}}{% endif %}{% endfor %}"
        ),
        "llama3": (
            "{{ bos_token }}{% for message in messages %}"
            "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
            "{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'].strip() + '<|eot_id|>' }}{% endgeneration %}"
            "{% else %}{{ message['content'].strip() + '<|eot_id|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ "
            "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
        ),
    }
)
_QWEN_TOOLS = r"""
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and " }}
    {{- "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
"""
_QWEN_RESULTS = r"""
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
_QWEN_2_5 = (
    r"""
{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- set opened = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + (messages[0].content if opened else default) }}
{%- if tools %}
    {{- '\n\n' }}"""
    + _QWEN_TOOLS
    + r"""
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- content if content or not message.tool_calls else '' }}
        {%- for called in message.tool_calls or [] %}
            {%- set call = called.function if called.function is defined else called %}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
        {%- endgeneration %}"""
    + _QWEN_RESULTS
)
_QWEN_3 = (
    r"""
{%- set opened = messages[0].role == 'system' %}
{%- if tools or opened %}{{- '<|im_start|>system\n' }}{%- endif %}
{%- if opened %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
    {{- '\n\n' if opened else '' }}"""
    + _QWEN_TOOLS
    + r"""
{%- endif %}
{%- if tools or opened %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- for called in message.tool_calls or [] %}
            {%- set call = called.function if called.function else called %}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
        {%- endgeneration %}"""
    + _QWEN_RESULTS
    + r"""
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}
{%- endif %}"""
)
_PHI_3 = r"""
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and message.content) %}
        {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\n' }}
        {%- generation %}
        {{- message.content + '<|end|>\n' }}
        {{- eos_token if loop.last and not add_generation_prompt else '' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- elif messages[-1].role != 'assistant' %}
    {{- eos_token }}
{%- endif %}"""
_ALTERNATING = r"""
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns, and the user begins') }}
    {%- endif %}
"""
_GEMMA_TURNS = (
    r"""
{%- for message in turns %}"""
    + _ALTERNATING
    + r"""
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation %}
        {{- message.content | trim + '<end_of_turn>\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<start_of_turn>' + message.role + '\n' + (before if loop.first else '') }}
        {{- message.content | trim + '<end_of_turn>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
)
_GEMMA = (
    r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- raise_exception('Gemma has no system messages') }}
{%- endif %}
{%- set turns = messages %}
{%- set before = '' %}"""
    + _GEMMA_TURNS
)
_GEMMA_3 = (
    r"""
{{- bos_token }}
{%- set opened = messages[0].role == 'system' %}
{%- set turns = messages[1:] if opened else messages %}
{%- set before = messages[0].content + '\n\n' if opened else '' %}"""
    + _GEMMA_TURNS
)
_MISTRAL = (
    r"""
{{- bos_token }}
{%- for message in messages %}"""
    + _ALTERNATING
    + r"""
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- message.content + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- raise_exception('Mistral has the roles user and assistant alone') }}
    {%- endif %}
{%- endfor %}"""
)
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "qwen2.5": _QWEN_2_5,
        "qwen3": _QWEN_3,
        "phi3": _PHI_3,
        "gemma": _GEMMA,
        "gemma3": _GEMMA_3,
        "mistral": _MISTRAL,
    }
)
"""Templates of families of models."""
BUILT_IN: Mapping[str, str] = MappingProxyType({**_GENERAL, **FAMILIES})
"""All built-in templates."""

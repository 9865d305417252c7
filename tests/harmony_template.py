"""A chat template of the shape of gpt-oss's, for tests."""

TEMPLATE = """
{%- macro line(head, text) %}<|start|>{{ head }}<|message|>{{ text }}<|end|>{% endmacro %}
{{- line("system", "Reasoning: " + (reasoning_effort or "medium")) }}
{%- for tool in tools or [] %}
    {{- line("developer", tool.function.name + ": " + tool.function.description) }}
{%- endfor %}
{%- set last = namespace(name="") %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if message.content and message.thinking %}{{ raise_exception("both") }}{% endif %}
        {%- set thought = message.content or message.thinking %}
        {%- if thought %}{{ line("assistant<|channel|>analysis", thought) }}{% endif %}
        {%- set last.name = "functions." + message.tool_calls[0].function.name %}
        {{- "<|start|>assistant to=" + last.name + "<|channel|>commentary json<|message|>" }}
        {{- message.tool_calls[0].function.arguments|tojson + "<|call|>" }}
    {%- elif message.role == "tool" %}
        {{- line(last.name + " to=assistant<|channel|>commentary", message.content|tojson) }}
    {%- elif message.role == "assistant" %}
        {{- line("assistant<|channel|>final", message.content) }}
    {%- else %}
        {{- line(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""

"""Templates that would take the machine end with an error, in little time and memory."""

from __future__ import annotations

import re
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
from megatron_llama.errors import DataError
from megatron_llama.tune.sft import bounded_jinja
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
DOUBLED = "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
LISTS = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops with text": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "a range too long": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "macros that call twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "macros without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loops": "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a product of a list": "{{ ([1] * 10 ** 9) | length }}",
    "a product the other way": "{{ 10 ** 10 * 'a' }}",
    "a power": "{{ 10 ** 999999999 }}",
    "numbers": DOUBLED.replace("'aa'", "99").replace("STEP", "ns.x * ns.x"),
    "sums": DOUBLED.replace("STEP", "ns.x + ns.x"),
    "joins": DOUBLED.replace("STEP", "ns.x ~ ns.x"),
    "blocks": DOUBLED.replace("{% set ns.x = STEP %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "lists put out": LISTS + "{{ ns.x }}",
    "lists as text": LISTS + "{{ ns.x | string | length }}",
    "lists as JSON": LISTS + "{{ ns.x | tojson | length }}",
    "lists joined with a text": LISTS + "{{ 'x' ~ ns.x }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(1000000) | length }}",
    "replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) | length }}",
    "the method replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) | length }}",
    "join": "{{ ([1] * 1000000) | join('b' * 1000000) | length }}",
    "the method join": "{{ ('b' * 1000000).join(['x'] * 1000000) | length }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) | length }}",
    "indent": "{{ ('a\n' * 100000) | indent(1000000) | length }}",
    "batch": "{{ [1] | batch(3000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(3000000000) | list | length }}",
    "tojson": "{{ [1] | tojson(indent=3000000000) }}",
    "a width in %": "{{ '%3000000000d' % 1 }}",
    "a star in %": "{{ '%*d' % (3000000000, 1) }}",
    "a width in format": "{{ '{:3000000000}'.format(1) }}",
    "a nested width in format": "{{ '{:{}}'.format(1, 3000000000) }}",
    "format often": "{{ ('{0}' * 100000).format('a' * 1000000) | length }}",
    "the filter format": "{{ '%3000000000d' | format(1) }}",
    "bytes": "{{ (5).to_bytes(3000000000, 'big') | length }}",
    "map": "{{ range(99999) | map('string') | map('center', 1000000) | list | length }}",
    "lists walked": "{% set r = range(99999) | list %}{% for i in r %}{% for j in r | sort | unique %}{% endfor %}{% endfor %}",
    "places for widths": "{{ (':' * 100000) % 1 }}{{ (':' * 100000).format(1) }}" * 9,
    "lists compared": LISTS + LISTS.replace("ns", "other") + "{{ ns.x == other.x }}",
    "lists ordered": LISTS + LISTS.replace("ns", "other") + "{{ ns.x < other.x }}",
    "lists searched": LISTS + LISTS.replace("ns", "other") + "{{ ns.x in [1, other.x] }}",
    "lists compared by a test": LISTS + LISTS.replace("ns", "other") + "{{ [ns.x] | select('eq', other.x) | list | length }}",
    "lists counted": LISTS + LISTS.replace("ns", "other") + "{{ [ns.x].count(other.x) }}",
    "tuples as keys": TUPLES + "{{ {ns.x: 1} | length }}",
    "tuples as keys of dict()": TUPLES + "{{ dict([(ns.x, 1)]) | length }}",
    "tuples looked up": TUPLES + "{{ {1: 2}[ns.x] }}",
    "tuples given to get": TUPLES + "{{ {1: 2}.get(ns.x) }}",
    # Ten gigabytes: a worker that has run other tests may hold freed memory, which is used again before the process grows.
    "texts that are kept": "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, 'a' * 1000000] %}{% endfor %}",
    "texts that are kept, by sums": "{% set ns = namespace(x=[], t='a' * 9999999) %}{% for i in range(999) %}"
    "{% set ns.x = ns.x + [ns.t + 'b'] %}{% endfor %}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_one_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of steps and time are lowered, so that the test is quick; the error names the template and not a conversation's loss."""
    monkeypatch.setattr(bounded_jinja, "TEMPLATE_STEPS", 300_000)
    monkeypatch.setattr(bounded_jinja, "TEMPLATE_SECONDS", 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((UnusableError, DataError)) as refused:
        ChatTemplate(HOSTILE[name], "t", {}).render(MESSAGES)
    problem = refused.value
    text = problem.at("f:1").message if isinstance(problem, UnusableError) else str(problem)
    assert re.search(r"\(from t\)|^t: got", text), text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "t: got RecursionError"),
        ("{% for a in b %}" * 100 + "{% endfor %}" * 100, "t: got (SyntaxError|RecursionError|IndentationError): "),
        ("x" * (1 << 20) + "y", "t: got 1,048,577 characters, expected a template of 1,048,576 at most"),
    ],
)
def test_templates_that_python_cannot_compile_are_named(source: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ChatTemplate(source, "t", {})


def test_each_conversation_has_a_budget_of_its_own() -> None:
    """Also in another thread, one at a time: the memory that is looked at is the process's. And a long one has room: its text is gathered, and
    each piece makes it anew."""
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}{{ 'a' * (60 * 1024 * 1024) }}", "t", {})
    assert [len(template.render(MESSAGES).text) for _ in range(6)] == [60 << 20] * 6
    with ThreadPoolExecutor(1) as pool:
        assert [len(rendered.text) for rendered in pool.map(template.render, [MESSAGES] * 3)] == [60 << 20] * 3
    long = [{"role": "user", "content": "word " * 200} for _ in range(1000)]
    piece = "ns.x + '<|' + m.role + '|>' + m.content + '.'"
    source = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = " + piece + " %}{% endfor %}{{ ns.x }}"
    assert ChatTemplate(source, "t", {}).render(long).text == f"<|user|>{'word ' * 200}." * 1000


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for c in messages | map(attribute='content') %}{{ loop.revindex }}{{ c }}{% endfor %}", "2a b1c"),
        ("{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v ~ 1 ~ none }};{% endfor %}", "role=user1None;content=a b1None;"),
        ("{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "123"),
        ("{% for m in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content }}{% endfor %}", "1a b"),
        ("{{ 'x' * 3 + 'y' }}{{ 2 * 3 ** 2 }}{{ '%3d|%s' % (7, 'a') }}{{ '{:>4}'.format('z') }}", "xxxy18  7|a   z"),
        ("{{ ' a ' | trim | upper | center(5) }}{{ [1, 2] | join(', ') }}{{ 'aXb'.replace('X', '--') }}", "  A  1, 2a--b"),
        ("{% macro m(a) %}<{{ a }}{{ caller() }}>{% endmacro %}{% call m(1) %}in{% endcall %}", "<1in>"),
        ("{{ messages == messages }}{{ [1] in [[1]] }}{{ 'a' < 'b' <= 'b' }}{{ {(1, 2): 'k'}[(1, 2)] }}{{ {'a': 1}.get('a') }}", "TrueTrueTruek1"),
        ("{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | join }}{{ dict(a=1).a }}", "a b1"),
        ("{{ {'a': [1, none]} | tojson(indent=1) }}{{ messages[0] | length }}", '{\n "a": [\n  1,\n  null\n ]\n}2'),
    ],
)
def test_templates_render_as_without_bounds(source: str, text: str) -> None:
    assert ChatTemplate(source, "t", {}).render(MESSAGES).text == text

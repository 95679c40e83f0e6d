"""A template is foreign code: what it gets, what it may not do, and that it ends."""

import json
from datetime import datetime

import pytest

from localspec.errors import TemplateError
from localspec.text import sandbox
from localspec.text.sandbox import SandboxedTemplate

NOON = datetime(2024, 2, 29, 12, 0, 0)


def render(source, **variables):
    return SandboxedTemplate(source).render(variables, NOON)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a\n{% if true %}\n  b\n{% endif %}\nc", "a\n  b\nc"),
        ("  {% if true %}x{% endif %}", "x"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{% generation %}{{ 1 + 1 }}{% endgeneration %}", "2"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        (
            "{% for i in 'ab' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
            "1/2False 2/2True ",
        ),
        ("{{ '%s-%03d' | format('a', 7) }}{{ '{}'.format(1) }}{{ 'x%d' % 2 }}", "a-0071x2"),
        ("{{ 'ab' * 2 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ [1] + [2] }}", "abab121024[1, 2]"),
        ("{{ missing }}{{ missing is defined }}", "False"),
        (
            "{% macro m() %}<{{ caller() if caller }}>{% endmacro %}{{ m() }}{% call m() %}!{% endcall %}",
            "<><!>",
        ),
    ],
)
def test_offers_what_templates_expect(source, text):
    assert render(source) == text


def test_tojson_keeps_order_and_characters():
    value = {"b": "é<&>'", "a": [1, None]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "é<&>\'", "a": [1, null]}'
    assert render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, ensure_ascii=False, indent=2)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__self__.__class__.__base__ }}",
        "{{ ('{0.__class__.__mro__}').format('') }}",
        "{{ (['']|map(attribute='__class__')|list)[0].__mro__ }}",
        "{{ ('' | attr('format'))('x') }}{{ ''|attr('__class__')|attr('__mro__') }}{{ 1/0 }}",
        "{{ m.append(1) }}",
        "{{ m.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_lets_nothing_out_and_changes_nothing(source):
    messages = [{"role": "user"}]
    with pytest.raises(TemplateError, match=r"^the chat template failed: "):
        render(source, m=messages)
    assert messages == [{"role": "user"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_ends_what_runs_too_long(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CPU_S", 0.05)
    with pytest.raises(TemplateError, match=r"it ran for more than 0\.05 s"):
        render(source)


DOUBLE = "{% set n = namespace(x='xx') %}{% for i in range(18) %}{% set n.x = BODY %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLE.replace("BODY", "n.x ~ n.x"),
        DOUBLE.replace("BODY", "n.x + n.x"),
        DOUBLE.replace("BODY", "n.x * 2"),
        DOUBLE.replace("BODY", "2 * n.x").replace("'xx'", "[1]"),
        "{% set n = namespace(x=9) %}{% for i in range(18) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 2 ** 100000 }}",
        "{% for i in range(5000) %}xxx{% endfor %}",
        "{{ ('%99999d' % 1) | length }}",
        "{{ ('%*d' % (99999, 1)) | length }}",
        "{{ ('%99999d' | format(1)) | length }}",
        "{{ ('{:99999}'.format(1)) | length }}",
        "{{ ('{a:99999}'.format_map({'a': 1})) | length }}",
        "{{ ('x'.ljust(99999)) | length }}",
        "{{ ('x' | center(99999)) | length }}",
        "{{ ([1] | tojson(indent=99999)) | length }}",
        "{{ ('x' * 999).replace('x', 'y' * 99) | length }}",
        "{{ ('x' * 999) | replace('x', 'y' * 99) | length }}",
        "{{ ('x' * 999).join(['y'] * 99) | length }}",
        "{{ ','.join(['y' * 999] * 99) | length }}",
        "{{ (['y'] * 99) | join('x' * 999) | length }}",
        "{{ ('x' * 99).translate({120: 'y' * 999}) | length }}",
        "{{ ('{0}' * 99).format('y' * 999) | length }}",
        "{{ ('{a}' * 99).format(a='y' * 999) | length }}",
        "{{ ('{a}' * 99).format_map({'a': 'y' * 999}) | length }}",
        "{{ (('%s' * 99) % (['y' * 999] * 99)) | length }}",
        "{{ (('%(a)s' * 99) % {'a': 'y' * 999}) | length }}",
        "{{ 'x' | indent(99999, true) | length }}",
        "{{ ('x\n' * 999) | indent(99) | length }}",
        "{{ (1).to_bytes(99999, 'big') | length }}",
        "{{ 'x'.encode().ljust(99999) | length }}",
        "{{ [1] | batch(99999, 'x') | first | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_ends_what_grows_too_large(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 10_000)
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a-b-c'.replace('-', '+', 1) }}", "a+b-c"),
        ("{{ 'a-b' | replace('-', '') }} {{ 'aa' | replace('a', 'b', 1) }}", "ab ba"),
        ("{{ ', '.join(['a', 'b'] | map('upper')) }}", "A, B"),
        ("{{ [1, 2] | join('+') }} {{ [{'k': 1}] | join(attribute='k') }}", "1+2 1"),
        ("{{ '{} {k}'.format(1, k=2) }} {{ '%s-%d' % ('a', 3) }} {{ '%s' | format('b') }}", "1 2 a-3 b"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a' | indent('>', true) }}", "a\n  b|>a"),
    ],
)  # fmt: skip
def test_what_is_checked_still_works(source, text):
    assert render(source) == text


def test_the_budget_is_per_rendering(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 150)
    template = SandboxedTemplate("{{ 'x' * 100 }}")
    assert [len(template.render({}, NOON)) for _ in range(3)] == [100, 100, 100]


def test_a_refusal_is_one_line():
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('No system\n\nrole ' ~ 'x' * 500) }}")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("the chat template failed: No system role xxx")
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("source", ["{% if %}", "a\n{{ 'open", "{% nosuchtag %}", "{{ x | nosuchfilter }}"])
def test_names_the_line_that_does_not_compile(source):
    with pytest.raises(TemplateError, match=r"^the chat template does not compile: .* \(line \d\)$"):
        SandboxedTemplate(source)

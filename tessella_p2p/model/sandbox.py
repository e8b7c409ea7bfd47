"""Jinja for templates that nobody here wrote: no escape, and no more work than a budget allows.

`ImmutableSandboxedEnvironment` keeps a template from reaching Python's insides, not from looping or growing strings for ever. So
each rendering has a budget of work units, and everything that can take long or grow pays from it first: turns of loops, calls,
filters, tests, comparisons, operators and output, each for the size of what it is about to touch. Filters that make much out
of little (``center``, ``indent``, ``format``…) are not there at all. What a template may use otherwise is what transformers gives
it: ``trim_blocks``, ``lstrip_blocks``, ``break`` and ``continue``, ``namespace``, ``raise_exception``, ``strftime_now``, and a
``tojson`` that does not escape HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tessella_p2p.base.limits import MAX_TEMPLATE_WORK

_TURN: Final = 1024
"""Work units of one turn of a loop, one call, one operation."""
_ITEM: Final = 64
"""Work units of one element of a list or mapping that is copied, compared or printed."""
_MAX_RANGE: Final = 10_000
_MAX_REASON_CHARS: Final = 500
_MAX_NUMBER_BITS: Final = 256
_BUDGET: Final = "the budget of this rendering"
"""The context's name for the budget: no identifier, so that no template can read or replace it."""
_REFUSED_NODES: Final = (
    nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.FilterBlock, nodes.ScopedEvalContextModifier,
)  # fmt: skip

_FILTERS: Final = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length", "list",
    "lower", "map", "max", "min", "reverse", "round", "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
_FREE_FILTERS: Final = frozenset({"count", "d", "default", "first", "last", "length"})
_SHALLOW_FILTERS: Final = frozenset({"items", "list", "reject", "rejectattr", "reverse", "select", "selectattr"})
"""Filters that copy a list and leave what it holds alone."""
_STRING_METHODS: Final = frozenset(
    {
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isspace", "isupper",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper",
    }
)  # fmt: skip


class OutOfBudget(jinja2.TemplateRuntimeError):
    """The template wants more work than a rendering may cost."""


class Raised(jinja2.TemplateRuntimeError):
    """The template called ``raise_exception``: it does not accept this conversation."""


class Budget:
    """Work units that one rendering has left."""

    __slots__ = ("left",)

    def __init__(self, units: int = MAX_TEMPLATE_WORK) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Pay, or end the rendering.

        Raises:
            OutOfBudget: when it costs more than is left.
        """
        self.left -= units
        if self.left < 0:
            raise OutOfBudget("the template wants to loop or to write more than a chat template may")

    def spend_for_copy(self, value: object) -> None:
        """Pay for one string or list, not for what the list holds.

        Raises:
            OutOfBudget: when it costs more than is left, or is a number that only grows.
        """
        if isinstance(value, str | bytes):
            self.spend(len(value) + 1)
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            self.spend(_ITEM * len(value) + 1)
        elif isinstance(value, int) and value.bit_length() > _MAX_NUMBER_BITS:
            raise OutOfBudget("the template computes with numbers of hundreds of digits")
        else:
            self.spend(1)

    def spend_for_all(self, value: object) -> None:
        """Pay for reading all that ``value`` holds; shared parts of a structure count each time that they occur.

        Raises:
            OutOfBudget: as `spend_for_copy`.
        """
        pending = [value]
        while pending:
            item = pending.pop()
            self.spend_for_copy(item)
            if isinstance(item, Mapping):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                pending.extend(item)


class _Metering(NodeTransformer):
    """Puts a payment in front of everything in a parsed template that costs time or memory."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja dispatches on these names)
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not used in chat templates", node.lineno)
        self.generic_visit(node)
        node.iter = _through("_turns", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        printed = [nodes.Const(e.data, lineno=e.lineno) if isinstance(e, nodes.TemplateData) else e for e in node.nodes]
        node.nodes = [_through("_paid", expression) for expression in printed]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """``a ~ b`` as an addition of strings, which the environment intercepts."""
        self.generic_visit(node)
        joined, *parts = (_through("string", _through("_paid", part)) for part in node.nodes)
        total: nodes.Expr = joined
        for part in parts:
            total = nodes.Add(total, part, lineno=node.lineno)
        return total

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _through("_paid", node.expr)
        for operand in node.ops:
            operand.expr = _through("_paid", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _through("_copied", node.node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.node is not None and node.name not in _FREE_FILTERS:
            node.node = _through("_copied" if node.name in _SHALLOW_FILTERS else "_paid", node.node)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.args:
            node.node = _through("_paid", node.node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through("_copied", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through("_copied", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through("_copied", node) if node.ctx == "load" else node  # the other one is the target of an assignment


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    """``node|name``."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; a template that it compiled is rendered with `render`, which gives it a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], cache_size=0)
        self.filters = {name: self.filters[name] for name in _FILTERS} | {
            "_copied": _copied,
            "_paid": _paid,
            "_turns": _turns,
            "join": _join,
            "replace": _replace,
            "tojson": _tojson,
        }
        for name in ("select", "reject", "selectattr", "rejectattr"):
            self.filters[name] = _per_item(jinja2.filters.FILTERS[name])
        self.globals = {
            "range": _range,
            "dict": _dict,
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
        }

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        """Jinja's documented hook between parsing and code generation."""
        for refused in source.find_all(_REFUSED_NODES):
            raise jinja2.TemplateSyntaxError(f"{type(refused).__name__} is not used in chat templates", refused.lineno)
        metered = _Metering().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, name, filename, defer_init)

    def wrap_str_format(self, value: object) -> None:
        """No ``str.format``: a width in it makes any length out of a few characters."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only what reads: methods of text, mappings and lists by name, and what belongs to loops, namespaces and macros."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        if isinstance(obj, Mapping):
            return attr in ("get", "items", "keys", "values")
        if isinstance(obj, list | tuple):
            return attr in ("count", "index")
        return isinstance(obj, LoopContext | Namespace | Macro | jinja2.Undefined)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Pay for an operation that can make much out of little, then do it."""
        budget = _budget(context)
        budget.spend_for_copy(left)
        budget.spend_for_copy(right)
        if operator == "**" or (operator == "%" and isinstance(left, str | bytes)):
            raise SecurityError(f"operator {operator} on {type(left).__name__} is not used in chat templates")
        if operator == "*":
            budget.spend(_product_units(left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (jinja's signature)
        """Pay for a call, then make it."""
        budget = _budget(__context)
        budget.spend(_TURN)
        receiver = getattr(__obj, "__self__", None)
        budget.spend_for_copy(receiver if isinstance(receiver, str | Mapping | list | tuple) else None)
        for argument in (*args, *kwargs.values()):
            budget.spend_for_copy(argument)
        if isinstance(receiver, str) and __obj.__name__ == "replace" and len(args) >= 2:
            _pay_for_replacing(budget, receiver, *args[:2])
        return super().call(__context, __obj, *args, **kwargs)


def render(
    template: jinja2.Template, variables: Mapping[str, object], *, max_chars: int, units: int = MAX_TEMPLATE_WORK
) -> str:
    """The text that ``template`` makes of ``variables``.

    Args:
        template: compiled by a `BoundedEnvironment`.
        variables: what the template may read.
        max_chars: of the text.
        units: the budget.

    Raises:
        OutOfBudget: too much work, or too long a text.
        Raised: the template does not accept the variables.
        Exception: whatever else a program may raise; a template is one.
    """
    parts: list[str] = []
    left = max_chars
    for part in template.generate({**variables, _BUDGET: Budget(units)}):
        left -= len(part)
        if left < 0:
            raise OutOfBudget(f"the template writes over {max_chars} characters")
        parts.append(part)
    return "".join(parts)


def _budget(context: Context) -> Budget:
    budget = context.parent[_BUDGET]
    assert isinstance(budget, Budget)  # `render` put it there
    return budget


def _product_units(left: object, right: object) -> int:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            return len(sequence) * max(times, 0) * (1 if isinstance(sequence, str | bytes) else _ITEM)
    return 1


def _pay_for_replacing(budget: Budget, text: str, old: object, new: object) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.spend(text.count(old) * len(new) + len(text))


# ---- Filters and globals ----


@jinja2.pass_context
def _copied(context: Context, value: object) -> object:
    """The value itself, once a copy of it is paid for."""
    _budget(context).spend_for_copy(value)
    return value


@jinja2.pass_context
def _paid(context: Context, value: object) -> object:
    """The value itself, once all that it holds is paid for."""
    _budget(context).spend_for_all(value)
    return value


@jinja2.pass_context
def _turns(context: Context, items: Iterable[object]) -> Iterator[object]:
    """The items of a loop; each turn is paid for."""
    budget = _budget(context)
    for item in items:
        budget.spend(_TURN)
        yield item


@jinja2.pass_context
def _join(context: Context, items: Iterable[object], separator: object = "") -> str:
    budget = _budget(context)
    parts: list[str] = []
    for item in _turns(context, items):
        budget.spend_for_all(item)
        budget.spend_for_all(separator)
        parts.append(str(item))
    return str(separator).join(parts)


@jinja2.pass_context
def _replace(context: Context, text: object, old: str, new: str) -> str:
    subject = str(text)
    _pay_for_replacing(_budget(context), subject, old, new)
    return subject.replace(old, new)


@jinja2.pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as transformers' filter of this name gives it."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise SecurityError("tojson: an indent of 0 to 16 is accepted")
    if separators is not None and max(map(len, separators)) > 16:
        raise SecurityError("tojson: separators of at most 16 characters are accepted")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _budget(context).spend_for_copy(text)
    return text


def _per_item(filter_: Callable[..., Iterable[object]]) -> Callable[..., list[object]]:
    """``select`` and its like, paying for the arguments of the test once per item."""

    @jinja2.pass_context
    def metered(context: Context, items: Iterable[object], *args: object, **kwargs: object) -> list[object]:
        budget = _budget(context)
        kept = list(_turns(context, items))
        before = budget.left
        budget.spend_for_all((args, kwargs))
        budget.spend((before - budget.left) * len(kept))
        return list(filter_(context, kept, *args, **kwargs))

    return metered


@jinja2.pass_context
def _range(context: Context, *bounds: int) -> list[int]:
    numbers = range(*bounds)
    if len(numbers) > _MAX_RANGE:
        raise OutOfBudget(f"the template wants a range of {len(numbers)} numbers; {_MAX_RANGE} are accepted")
    _budget(context).spend(_ITEM * len(numbers))
    return list(numbers)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise Raised(str(message)[:_MAX_REASON_CHARS])


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that mean something to Python or to jinja."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may set ``self``
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")

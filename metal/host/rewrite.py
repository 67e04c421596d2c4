"""Metal source, preprocessed, into C++ that the shim understands.

Four things in Metal's grammar have no counterpart in C++:

* ``threadgroup T x[n];`` declares memory of the threadgroup: it becomes a reference
  into the runtime's arena. A threadgroup *pointer* stays a pointer.
* ``constant T x [[function_constant(n)]];`` becomes a variable that a launch sets.
* ``[[kernel]] void f(...)`` keeps its body; the attributes of its parameters are read
  off and say where the launch glue finds each argument.
* ``template [[host_name("x")]] ...`` names an instantiation; it becomes glue.

Everything else is left alone: address spaces are macros of the shim, and all other
attributes are dropped. The rewrite works on tokens and keeps every line where it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .toolchain import CompileError

# The order is that of the indices in shim/kernel.h.
ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid",
    "grid_origin",
    "grid_size",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
    "quadgroup_index_in_threadgroup",
    "thread_index_in_quadgroup",
    "quadgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
)
FIRST_ATTRIBUTE = 1000

_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\''  # strings, characters
    r"|^[ \t]*#[^\n]*$"  # line markers
    r"|[A-Za-z_]\w*|\d[\w.\']*|\s+|.",
    re.MULTILINE | re.DOTALL,
)
_BRACKETED = re.compile(r"\[\[.*?\]\]", re.DOTALL)
_DECLARATOR = re.compile(r"^(.*?)(\w+)\s*((?:\[.*\])?)\s*$", re.DOTALL)
_FUNCTION_CONSTANT = re.compile(
    r"\s*(?:const\s+)?(.+?)\s+(\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]\s*$",
    re.DOTALL,
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel.

    Attributes:
        name: Its name in the source.
        index: The buffer index, or ``FIRST_ATTRIBUTE`` + the index of the attribute.
        output: Whether it is a buffer that the kernel may write.
    """

    name: str
    index: int
    output: bool

    @property
    def buffer(self) -> bool:
        """Whether the caller passes it."""
        return self.index < FIRST_ATTRIBUTE


@dataclass
class Rewritten:
    """The C++ text and what the launch glue must know about it.

    Attributes:
        text: The C++ text.
        kernels: The parameters of each kernel function.
        templates: The kernel functions that are templates.
        instances: (host name, expression) of each instantiation.
        constants: (index, name) of each function constant.
    """

    text: str = ""
    kernels: dict[str, list[Parameter]] = field(default_factory=dict)
    templates: set[str] = field(default_factory=set)
    instances: list[tuple[str, str]] = field(default_factory=list)
    constants: list[tuple[int, str]] = field(default_factory=list)


def _is_code(token: str) -> bool:
    return not (token.isspace() or token.lstrip().startswith("#"))


def _split(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside of all brackets."""
    parts, depth, angle, part = [], 0, 0, ""
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        angle += (c == "<") - (c == ">" and angle > 0)
        if c == separator and depth == 0 and angle == 0:
            parts.append(part)
            part = ""
        else:
            part += c
    return [*parts, part] if part.strip() else parts


def _outside_brackets(text: str) -> str:
    out, depth = "", 0
    for c in text:
        depth += c in "<(["
        if depth == 0:
            out += c
        depth -= c in ">)]"
    return out


def _parameters(text: str) -> list[Parameter]:
    parameters, next_buffer = [], 0
    for part in _split(text):
        attributes = " ".join(_BRACKETED.findall(part))
        plain = _BRACKETED.sub("", part).strip()
        name = re.search(r"(\w+)$", plain)
        if not name:
            raise CompileError(f"cannot read the kernel parameter {part.strip()!r}")
        known = [a for a in ATTRIBUTES if re.search(rf"\b{a}\b", attributes)]
        if known:
            index = FIRST_ATTRIBUTE + ATTRIBUTES.index(known[0])
            parameters.append(Parameter(name.group(1), index, False))
            continue
        if re.search(r"\bthreadgroup\s*\(", attributes):
            raise CompileError(
                f"the host has no [[threadgroup(n)]] arguments ({name.group(1)}): "
                "declare the threadgroup memory inside the kernel"
            )
        buffer = re.search(r"\bbuffer\s*\((\d+)\)", attributes)
        index = int(buffer.group(1)) if buffer else next_buffer
        next_buffer = index + 1
        output = not re.search(r"\bconst\b|\bconstant\b", plain)
        parameters.append(Parameter(name.group(1), index, output))
    return parameters


class _Rewriter:
    def __init__(self, text: str, lint: bool):
        self.tokens = _TOKEN.findall(text)
        self.lint = lint
        self.result = Rewritten()
        self.out: list[str] = []
        self.before = "{"  # the last token that is code
        self.variables = 0

    def rewrite(self) -> Rewritten:
        steps = {
            "threadgroup": self.threadgroup_variable,
            "constant": self.function_constant,
            "template": self.instantiation,
            "kernel": self.kernel,
            "[": self.attribute,
        }
        i = 0
        while i < len(self.tokens):
            token = self.tokens[i]
            after = steps[token](i) if token in steps else None
            if after is None:
                self.out.append(token)
                if _is_code(token):
                    self.before = token
                after = i + 1
            i = after
        self.result.text = "".join(self.out)
        return self.result

    def closing(self, i: int, left: str, right: str) -> int:
        """The index after the bracket that closes token i."""
        depth = 0
        for j in range(i, len(self.tokens)):
            depth += (self.tokens[j] == left) - (self.tokens[j] == right)
            if depth == 0:
                return j + 1
        raise CompileError(f"a {left!r} of the kernel source is never closed")

    def find(self, i: int, *wanted: str) -> int:
        while self.tokens[i] not in wanted:
            i += 1
        return i

    def code(self, i: int, j: int) -> str:
        return "".join(t for t in self.tokens[i:j] if _is_code(t) or t.isspace())

    def replace(self, text: str, i: int, j: int, before: str = ";") -> int:
        lines = "".join(self.tokens[i:j]).count("\n") - text.count("\n")
        self.out.append(text + "\n" * lines)
        self.before = before
        return j

    def threadgroup_variable(self, i: int) -> int | None:
        if self.before not in (";", "{", "}", ":"):
            return None  # a pointer, a parameter, a cast
        end = i
        while self.tokens[end] != ";":
            brace = self.tokens[end] == "{"
            end = self.closing(end, "{", "}") if brace else end + 1
        declaration = self.code(i + 1, end)
        if re.search(r"[*&=]", _outside_brackets(declaration)):
            return None
        first, *others = _split(declaration)
        type_name, *declarator = _DECLARATOR.match(first.strip()).groups()
        declarators = [tuple(declarator)]
        declarators += [_DECLARATOR.match(o.strip()).groups()[1:] for o in others]
        text = ""
        for name, extents in declarators:
            self.variables += 1
            alias = f"mtl_type_{self.variables}"
            text += f"typedef {type_name.strip()} {alias}{extents}; "
            if self.lint:
                place = f"*(threadgroup {alias}*)(ulong)64"
                text += f"threadgroup {alias}& {name} = {place}; "
                text += f"enum {{ mtl_bytes_{self.variables} = sizeof({alias}) }}; "
                text += (
                    f"static_assert(__is_trivially_constructible({alias}), "
                    f"\"'{name}' in threadgroup memory has a constructor\");"
                )
            else:
                key = f"mtl_key_{self.variables}"
                text += (
                    f"static const char {key} = 0; {alias}& {name} = "
                    f"*reinterpret_cast<{alias}*>(mtl_threadgroup_variable(&{key}, "
                    f'sizeof({alias}), alignof({alias}), "{name}"));'
                )
        return self.replace(text, i, end + 1)

    def function_constant(self, i: int) -> int | None:
        if self.before not in (";", "{", "}"):
            return None
        end = self.find(i, ";", "{", "=")
        found = _FUNCTION_CONSTANT.match("".join(self.tokens[i + 1 : end]))
        if not found or self.tokens[end] != ";":
            return None
        type_name, name, index = found.groups()
        self.result.constants.append((int(index), name))
        space = "constant constexpr " if self.lint else ""
        return self.replace(f"static {space}{type_name} {name}{{}};", i, end + 1)

    def instantiation(self, i: int) -> int | None:
        """Handles ``template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;``."""
        if self.before not in (";", "{", "}"):
            return None
        j = i + 1
        while not _is_code(self.tokens[j]):
            j += 1
        if self.tokens[j] != "[":
            return None
        end = self.find(j, ";")
        text = self.code(i, end)
        name = re.search(r'host_name\s*\(\s*"([^"]*)"\s*\)', text)
        plain = _BRACKETED.sub("", text)
        typed = re.search(r"\)\s*([\w:]+\s*<.*>)\s*$", plain, re.DOTALL)
        full = re.search(r"\bvoid\s+([\w:]+\s*<.*?>)\s*\(", plain, re.DOTALL)
        if not name or not (typed or full):
            return None
        expression = (typed or full).group(1)
        self.result.instances.append((name.group(1), expression))
        explicit = f"template decltype({expression}) {expression};" if self.lint else ""
        return self.replace(explicit, i, end + 1)

    def kernel(self, i: int, start: int | None = None) -> int | None:
        if start is None:
            if self.before not in (";", "{", "}", ">"):
                return None
            start = i + 1
        opening = self.find(start, "(")
        name = [t for t in self.tokens[start:opening] if _is_code(t)][-1]
        end = self.closing(opening, "(", ")")
        self.result.kernels[name] = _parameters(self.code(opening + 1, end - 1))
        if self.before == ">":
            self.result.templates.add(name)
        head = _BRACKETED.sub("", "".join(self.tokens[start:end]))
        return self.replace(head, i, end, ")")

    def attribute(self, i: int) -> int | None:
        if self.tokens[i + 1 : i + 2] != ["["]:
            return None
        end = self.closing(i, "[", "]")
        text = "".join(self.tokens[i:end])
        if re.search(r"\bkernel\b", text) and "host_name" not in text:
            return self.kernel(i, end)
        return self.replace("", i, end, self.before)


def rewrite(text: str, lint: bool = False) -> Rewritten:
    """Rewrites preprocessed Metal source.

    Args:
        text: The source, all includes and macros expanded.
        lint: Keep what lint's declarations can type-check instead of making it run.

    Raises:
        CompileError: The source uses something that the host does not have.
    """
    return _Rewriter(text, lint).rewrite()


def entries(rewritten: Rewritten) -> dict[str, str]:
    """The kernels that can be launched: host name to C++ expression."""
    named = {e.split("<")[0].strip().split("::")[-1] for _, e in rewritten.instances}
    plain = rewritten.kernels.keys() - rewritten.templates - named
    return dict(rewritten.instances) | {k: k for k in sorted(plain)}


def parameters_of(rewritten: Rewritten, expression: str) -> list[Parameter]:
    """The parameters of an entry's kernel function."""
    function = expression.split("<")[0].strip().split("::")[-1]
    if function not in rewritten.kernels:
        raise CompileError(f"the source has no kernel {function!r}")
    return rewritten.kernels[function]


def glue(rewritten: Rewritten) -> str:
    """The tables through which the runtime finds kernels and function constants."""
    kernels = ""
    for host_name, expression in entries(rewritten).items():
        indices = "".join(f", {p.index}" for p in parameters_of(rewritten, expression))
        call = f"mtlhost::Bind<&{expression}{indices}>::call"
        kernels += f'  {{"{host_name}", &{call}}},\n'
    constants = "".join(
        f"  {{{i}, &{name}, sizeof({name})}},\n" for i, name in rewritten.constants
    )
    return (
        '\nextern "C" {\n'
        f"mtlhost::KernelEntry mtl_kernels[] = {{\n{kernels}  {{}}}};\n"
        "mtlhost::FunctionConstant mtl_constants[] = {\n"
        f"{constants}  {{-1, nullptr, 0}}}};\n}}\n"
    )
